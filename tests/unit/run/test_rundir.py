"""The run directory: its name, what is refused, emptied and written, and where an attempt starts."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_support import FIXED, PARTS, append_rows, checkpoint, crashes, flip, read_json_lines, snapshot
from config_support import refused

from trireme.checkpoint.manifest import MANIFEST, CheckpointRef
from trireme.checkpoint.rows import ROW_FILES
from trireme.checkpoint.store import HEAD, CheckpointStore
from trireme.config import Config
from trireme.config.load import load
from trireme.core.errors import BadInput
from trireme.process import trace
from trireme.run.rundir import BEFORE_MARKS, MARKS, RunDir, resume_command

pytestmark = pytest.mark.usefixtures("instant_disk")


def config(output_dir: Path, name: str | None = "r", *flags: str) -> Config:
    required = ["--model.name", "./assets/tiny", "--env.id", "my.envs:Sort", "--orchestrator.batch-size", "2"]
    named = ["--run.name", name] if name else []
    return load(
        [*required, "--inference.sampling.max-tokens", "3", "--run.output-dir", str(output_dir), *named, *flags], {}
    ).config


def open_run(run_config: Config) -> RunDir:
    return RunDir.open(run_config, FIXED)


def refusal(run_config: Config) -> str:
    return refused(lambda: open_run(run_config))


def test_named(tmp_path: Path) -> None:
    with open_run(config(tmp_path / "deep" / "er")) as run:
        assert run.root == tmp_path / "deep" / "er" / "r"
        assert run.logs == run.root / "logs" / "attempt_1"
        assert run.logs.is_dir()
        assert (run.start.step, run.start.checkpoint, run.start.attempt, run.start.notes) == (0, None, 1, ())
        assert re.fullmatch("[0-9a-f]{8} [0-9a-f]{8}", f"{run.head.run_id} {run.head.lineage}")
        assert run.checkout() == []


def test_unnamed_runs_differ(tmp_path: Path) -> None:
    with open_run(config(tmp_path, None)) as one, open_run(config(tmp_path, None)) as other:
        assert re.fullmatch(r"envs-tiny-[0-9a-f]{8}", one.root.name)
        assert one.root != other.root


def test_config_json_runs_again(tmp_path: Path) -> None:
    run_config = config(tmp_path, "r", "--clean", "--trainer.learning-rate", "2e-4", "--env.args.length", "5")
    with open_run(run_config) as run:
        again = load(["@", str(run.root / "config.json"), "--trust-config"], {}).config
    assert again.model_dump(exclude={"clean"}) == run_config.model_dump(exclude={"clean"})
    assert not again.clean  # running it again must not empty anything
    with open_run(config(tmp_path, "r", "--resume")) as run:
        again = load(["@", str(run.root / "config.json"), "--trust-config"], {}).config
    assert not again.resume.requested  # nor go on from where it once went on


@pytest.mark.parametrize("name", ["../x", "a/b", "/a", ".."])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="the name of a directory, without slashes"):
        config(tmp_path, name)


def test_a_directory_in_use_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    open_run(config(tmp_path)).lock.close()
    text = refusal(config(tmp_path))
    assert all(part in text for part in (str(tmp_path / "r"), "another --run.name", "--clean", "--resume"))


@pytest.mark.parametrize("leftover", ["driver.lock", "config.json.new", "metrics.jsonl.new"])
def test_a_start_that_was_killed_at_once_leaves_nothing_in_the_way(tmp_path: Path, leftover: str) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / leftover).write_text("half")
    with open_run(config(tmp_path)) as run:
        load(["@", str(run.root / "config.json"), "--trust-config"], {})


def test_somebody_elses_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.txt").write_text("x")
    assert "--clean" not in refusal(config(tmp_path))
    assert "nothing else is ever emptied" in refusal(config(tmp_path, "r", "--clean"))
    assert os.listdir(tmp_path / "r") == ["thesis.txt"]


@pytest.mark.parametrize("mark", ["config.json", "metrics.jsonl"])
def test_clean_empties_a_run_directory(tmp_path: Path, mark: str) -> None:
    root = tmp_path / "r"
    outside = tmp_path / "outside"
    for directory in (root / "logs", outside):
        directory.mkdir(parents=True)
        (directory / "old.txt").write_text("old")
    (root / mark).write_text("old")
    (root / "link").symlink_to(outside)
    with open_run(config(tmp_path, "r", "--clean")) as run:
        assert not (root / "logs" / "old.txt").exists()
        assert not (root / "link").is_symlink()
        assert not (run.root / "metrics.jsonl").exists()
        assert (run.root / "config.json").read_text() != "old"
        assert run.start.attempt == 1
    assert (outside / "old.txt").exists()


@pytest.mark.parametrize("flags", [[], ["--clean"]])
def test_a_living_driver_keeps_its_directory(tmp_path: Path, flags: list[str]) -> None:
    with open_run(config(tmp_path)) as run:
        (run.root / "metrics.jsonl").write_text("row")
        text = refusal(config(tmp_path, "r", *flags))
        assert (run.root / "metrics.jsonl").read_text() == "row"
    assert f"pid {os.getpid()}" in text
    assert "another --run.name" in text


def test_the_lock_of_a_dead_driver_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from trireme.run.rundir import locked\n"
        "root = Path(sys.argv[1]); root.mkdir(); lock = locked(root); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "r")], check=False)
    assert (tmp_path / "r" / "driver.lock").read_text().startswith("pid ")
    with open_run(config(tmp_path)) as run:
        assert f"pid {os.getpid()}" in (run.root / "driver.lock").read_text()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("x")
    assert "another --run.output-dir" in refusal(config(tmp_path))
    assert "Not a directory" in refusal(config(Path("/dev/null")))


def test_emptying_that_was_interrupted_can_be_done_again(tmp_path: Path) -> None:
    with open_run(config(tmp_path)) as run:
        checkpoint(run.store, 2)
        (run.root / "metrics.jsonl").write_text("")
    for change in range(1, 100):
        if not crashes(change, lambda: open_run(config(tmp_path, "r", "--clean")).lock.close()):
            break
        assert any((run.root / mark).exists() for mark in MARKS) or set(os.listdir(run.root)) <= set(BEFORE_MARKS)
    assert change > 5
    assert CheckpointStore(run.root).checkpoints() == []


def test_the_resume_command_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    run_config = config(tmp_path / "with space")
    with open_run(run_config) as run:
        words = shlex.split(resume_command(run.root, trusted=True))
    assert words[:3] == ["uv", "run", "rl"]
    with open_run(load(words[3:], {}).config) as again:
        assert (again.root, again.start.attempt) == (run.root, 2)


def test_the_resume_command_has_the_variables_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another terminal lacks them. They are seen from anywhere, and a key for a service is no such one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f".{os.pathsep}my envs")
    monkeypatch.setenv("ANSWERER_KEY", "secret")
    with open_run(config(tmp_path)) as run:
        monkeypatch.delenv("PYTHONPATH")
        command = resume_command(run.root, longer=300, trusted=True)
    assert shlex.split(command)[0] == f"PYTHONPATH={tmp_path}{os.pathsep}{tmp_path}/my envs"
    assert command.endswith("--resume --max-steps 300")
    assert "secret" not in (run.root / "config.json").read_text()


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """A directory with a run `r` of two checkpoints that was killed in the middle of step 5."""
    with open_run(config(tmp_path)) as run:
        run.checkout()
        for step in (2, 4):
            checkpoint(run.store, step)
        for file in map(run.root.joinpath, ROW_FILES):
            append_rows(file, [{"step": step, "attempt": 1} for step in range(5)])
    return tmp_path


class TestResume:
    def test_nothing_changes_before_the_checkout(self, outputs: Path) -> None:
        root = outputs / "r"
        before = snapshot(root)
        with open_run(config(outputs, "r", "--resume.step", "2")) as run:
            lineage = run.head.lineage
        after = snapshot(root)
        changed = {name for name in before if before[name] != after[name]}
        assert changed <= {HEAD, "driver.lock", "config.json"}
        assert all(name.startswith("logs/attempt_2/") for name in set(after) - set(before))
        with open_run(config(outputs, "r", "--resume.step", "-1")) as run:
            assert (run.start.step, run.start.attempt, run.head.lineage) == (4, 3, lineage)

    @pytest.mark.parametrize("file", [*PARTS, MANIFEST])
    def test_a_damaged_step_is_refused(self, outputs: Path, file: str) -> None:
        flip(outputs / "r" / "checkpoints" / "step_000004" / file)
        before = snapshot(outputs)
        assert file in refusal(config(outputs, "r", "--resume.step", "4"))
        after = snapshot(outputs)
        del before["r/driver.lock"], after["r/driver.lock"]
        assert after == before

    def test_a_refused_resume_gives_the_lock_back(self, outputs: Path) -> None:
        refusal(config(outputs, "r", "--resume.step", "3"))
        open_run(config(outputs, "r", "--resume")).lock.close()

    def test_killed_before_the_first_checkpoint(self, tmp_path: Path) -> None:
        with open_run(config(tmp_path)) as run:
            append_rows(run.root / "metrics.jsonl", [{"step": 0}])
        with open_run(config(tmp_path, "r", "--resume")) as run:
            assert (run.start.step, run.start.checkpoint, run.start.attempt) == (0, None, 2)
            assert "no checkpoint yet" in run.start.notes[0]
            run.checkout()
            assert read_json_lines(run.root / "metrics.jsonl") == []
            assert len(list(run.root.glob("branches/*/metrics.jsonl"))) == 1

    @pytest.mark.parametrize("make", [False, True])
    def test_no_such_directory_is_a_new_run(self, tmp_path: Path, make: bool) -> None:
        """A job that may be preempted before it begins needs the same command line every time."""
        assert "holds no checkpoint" in refusal(config(tmp_path, "r", "--resume.step", "3"))
        if make:
            (tmp_path / "r").mkdir(exist_ok=True)
        with open_run(config(tmp_path, "r", "--resume")) as run:
            assert (run.start.step, run.start.attempt) == (0, 1)
            assert "a new run" in run.start.notes[0]

    def test_auto_is_one_command_for_the_start_and_for_all_resumes(self, tmp_path: Path) -> None:
        auto = config(tmp_path, "r", "--resume", "auto")
        for attempt, step in ((1, 0), (2, 2), (3, 4)):
            with open_run(auto) as run:
                assert (run.start.attempt, run.start.step) == (attempt, step)
                run.checkout()
                checkpoint(run.store, step + 2)

    def test_killed_anywhere_in_the_start(self, tmp_path: Path) -> None:
        """At every change of the file system, first of a new run and then of its resumes: attempts only grow."""
        for change in range(1, 100):
            if not crashes(change, lambda: open_run(config(tmp_path, "r", "--resume")).lock.close()):
                break
        assert change > 5
        with open_run(config(tmp_path, "r", "--resume")) as run:
            claimed = {int(path.name.removeprefix("attempt_")) for path in (run.root / "logs").iterdir()}
            assert run.start.attempt == max(claimed)

    @pytest.mark.parametrize("damage", [Path.unlink, Path.touch])
    def test_without_its_head(self, outputs: Path, damage: Callable[[Path], None]) -> None:
        (outputs / "r" / HEAD).unlink()
        if damage is Path.touch:
            (outputs / "r" / HEAD).touch()
        text = refusal(config(outputs, "r", "--resume"))
        assert f"--resume.dir {outputs / 'r'}" in text
        with open_run(config(outputs, "saved", "--resume.dir", str(outputs / "r"))) as run:  # as it says
            assert run.start.step == 4

    def test_inputs_are_recorded_for_each_attempt(self, outputs: Path) -> None:
        with open_run(config(outputs, "r", "--resume", "--trainer.learning-rate", "2e-4")) as run:
            now, logs = (run.root / "config.json").read_text(), run.root / "logs"
            assert json.loads(now)["trainer"]["learning_rate"] == 2e-4
            assert (logs / "attempt_2" / "config.json").read_text() == now
            assert json.loads((logs / "attempt_1" / "config.json").read_text())["trainer"]["learning_rate"] == "auto"

    @pytest.mark.parametrize("flags", [["--resume"], ["--resume.step", "2"]])
    def test_traces_of_earlier_attempts_stay(self, outputs: Path, flags: list[str]) -> None:
        trace.start(outputs / "r" / "logs" / "attempt_1", "driver_0", 1)
        with trace.span("step", step=4):
            pass
        trace.stop()
        first, second = (outputs / "r" / "trace" / f"attempt_{number}" / "driver_0.json" for number in (1, 2))
        before = first.read_bytes()
        with open_run(config(outputs, "r", *flags)) as run:
            run.checkout()
            trace.start(run.logs, "driver_0", 1)
            trace.stop()
        assert first.read_bytes() == before
        assert second.exists()
        assert list(outputs.glob("r/branches/*/trace")) == []


class TestResumeWithoutAName:
    def test_the_newest_of_its_kind(self, tmp_path: Path) -> None:
        roots = []
        for time in (2_000_000_000, 1_000_000_000):
            with open_run(config(tmp_path, None)) as run:
                roots.append(run.root)
            os.utime(run.root / "config.json", (time, time))
        for other in ("envs-tiny-0123456789", "sort-tiny-01234567", "envs-tiny-mine", "other"):
            open_run(config(tmp_path, other)).lock.close()
        with open_run(config(tmp_path, None, "--resume")) as run:
            assert run.root == roots[0]
            assert str(run.root) in run.start.notes[0]

    def test_of_none(self, tmp_path: Path) -> None:
        text = refusal(config(tmp_path, None, "--resume"))
        assert "envs-tiny-" in text
        assert "--run.name" in text


class TestFork:
    def fork(self, outputs: Path, *flags: str) -> Config:
        return config(outputs, "fork", "--resume.dir", str(outputs / "r"), *flags)

    def test_of_the_newest(self, outputs: Path) -> None:
        before = snapshot(outputs / "r")
        with open_run(self.fork(outputs)) as run:
            assert run.root == outputs / "fork"
            assert run.start.step == 4
            assert run.start.checkpoint == run.root / "checkpoints" / "step_000004"
            assert run.start.attempt == 2  # the checkpoint's was 1
            assert "hard links" in run.start.notes[-1]
            head = run.store.head()
            assert head.base == CheckpointRef(json.loads((outputs / "r" / HEAD).read_text())["lineage"], 4)
            run.checkout()
            assert [row["step"] for row in read_json_lines(run.root / "metrics.jsonl")] == [0, 1, 2, 3]
            checkpoint(run.store, 6, attempt=2)
            run.store.prune(1, None)
        assert snapshot(outputs / "r") == before
        with open_run(config(outputs, "fork", "--resume")) as run:
            assert (run.start.step, run.start.attempt) == (6, 3)

    def test_of_a_step_without_a_name(self, outputs: Path) -> None:
        run_config = config(outputs, None, "--resume.dir", str(outputs / "r"), "--resume.step", "2")
        with open_run(run_config) as run:
            assert run.start.step == 2
            assert re.fullmatch(r"envs-tiny-[0-9a-f]{8}", run.root.name)

    def test_of_a_run_whose_driver_lives(self, outputs: Path) -> None:
        with open_run(config(outputs, "r", "--resume")), open_run(self.fork(outputs)) as forked:
            assert forked.start.step == 4

    def test_a_damaged_source(self, outputs: Path) -> None:
        flip(outputs / "r" / "checkpoints" / "step_000004" / PARTS[0])
        assert PARTS[0] in refusal(self.fork(outputs, "--resume.step", "4"))
        assert not (outputs / "fork").exists()
        with open_run(self.fork(outputs)) as run:
            assert run.start.step == 2
            assert all(part in run.start.notes[0] for part in ("passed over", PARTS[0]))

    @pytest.mark.parametrize("source", ["missing", "empty"])
    def test_without_a_checkpoint(self, outputs: Path, source: str) -> None:
        (outputs / "empty").mkdir()
        text = refusal(config(outputs, "fork", "--resume.dir", str(outputs / source)))
        assert "holds no checkpoint" in text
        assert not (outputs / "fork").exists()

    def test_into_a_run_that_began(self, outputs: Path) -> None:
        with open_run(self.fork(outputs)) as run:
            pass
        before = snapshot(run.root)
        assert "without --resume.dir" in refusal(self.fork(outputs))
        after = snapshot(run.root)
        assert {name for name in before if before[name] != after[name]} <= {"driver.lock"}
        assert "in use" in refusal(config(outputs, "r", "--resume.dir", str(outputs / "r")))

    def test_auto_forks_once_and_then_resumes_the_fork(self, outputs: Path) -> None:
        auto = self.fork(outputs, "--resume", "auto", "--resume.step", "2")
        with open_run(auto) as run:
            assert run.start.step == 2
            run.checkout()
            checkpoint(run.store, 3)
        with open_run(auto) as run:
            assert (run.start.step, run.start.checkpoint) == (3, run.root / "checkpoints" / "step_000003")

    @pytest.mark.parametrize("auto", [(), ("--resume", "auto")])
    def test_killed_anywhere(self, outputs: Path, auto: tuple[str, ...]) -> None:
        """The same command does it again; a plain resume never takes half a fork for a run from the beginning."""
        before = snapshot(outputs / "r")
        root = outputs / "fork"
        for change in range(1, 200):
            if not crashes(change, lambda: open_run(self.fork(outputs, *auto)).lock.close()):
                break
            if (root / "metrics.jsonl").exists() and not (root / HEAD).exists():
                assert "interrupted" in refusal(config(outputs, "fork", "--resume"))
            if (root / HEAD).exists():  # it is whole: the rest of its changes needs a new one
                shutil.rmtree(root)
        assert change > 20
        with open_run(config(outputs, "fork", "--resume")) as run:
            assert run.start.step == 4
            run.checkout()
            assert [row["step"] for row in read_json_lines(run.root / "trained.jsonl")] == [0, 1, 2, 3]
        assert snapshot(outputs / "r") == before


class TestCodeDiff:
    @pytest.fixture
    def checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A checkout with one checkpoint and one change after it."""
        directory = tmp_path / "checkout"
        directory.mkdir()
        monkeypatch.chdir(directory)
        (directory / "a.txt").write_text("before\n")
        for command in ("init -q", "add a.txt", "-c user.name=n -c user.email=e commit -q -m m"):
            subprocess.run(["git", *command.split()], check=True)
        (directory / "a.txt").write_text("after\n")
        return directory

    def test_a_run_writes_no_secret(self, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        token = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bD2fG4h"
        planted = {"diff": token, "key": "correct horse", "env": "battery staple"}
        monkeypatch.setenv("ANSWERER_API_KEY", planted["env"])
        (checkout / "a.txt").write_text(f"after {planted['diff']} {planted['env']}\n")
        (checkout / "untracked.txt").write_text(planted["diff"])
        flags = ("--env.args.api-key", planted["key"], "--env.args.url", f"http://{planted['env']}@host")
        with open_run(config(tmp_path / "out", "r", *flags)) as run:
            written = [file for file in run.root.rglob("*") if file.is_file()]
            texts = "".join(file.read_text() for file in written)
            assert {"config.json", "code.diff"} <= {file.name for file in written}
            assert [name for name, secret in planted.items() if secret in texts] == []
            assert re.search(r"checkpoint [0-9a-f]{40}\n(.|\n)*-before\n\+after \(secret", texts)
            assert [note for note in run.start.notes if "secret" in note] == [
                "config.json leaves out 2 values that look like secrets: (secret, left out)",
                "code.diff leaves out 2 values that look like secrets: (secret, left out)",
            ]
            again = ["@", str(run.root / "config.json"), "--trust-config"]
            with pytest.raises(BadInput, match=r"env.0.args.api_key = \(secret, left out\)"):
                load(again, {})
            assert load([*again, *flags], {}).config.env[0].args["api_key"] == planted["key"]

    def test_elsewhere_an_old_one_goes(self, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        open_run(config(tmp_path / "out")).lock.close()
        monkeypatch.chdir(tmp_path)
        with open_run(config(tmp_path / "out", "r", "--resume")) as run:
            assert not (run.root / "code.diff").exists()
            assert (run.root / "logs" / "attempt_1" / "code.diff").exists()
