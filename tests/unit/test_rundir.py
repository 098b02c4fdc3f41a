"""The run directory: its name, what is refused, what is emptied, what is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trireme.config import Config
from trireme.config.load import load
from trireme.errors import BadInput
from trireme.rundir import RunDir


def config(output_dir: Path, name: str | None = "r", *flags: str) -> Config:
    required = ["--model.name", "./assets/tiny", "--env.id", "my.envs:Sort", "--orchestrator.batch-size", "2"]
    named = ["--run.name", name] if name else []
    return load(
        [*required, "--inference.sampling.max-tokens", "3", "--run.output-dir", str(output_dir), *named, *flags], {}
    ).config


def refusal(given: Config) -> str:
    with pytest.raises(BadInput) as refused:
        RunDir.create(given)
    text = str(refused.value)
    for part in ("given: ", "expected: ", "to do: "):
        assert part in text
    return text


def test_named(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path / "deep" / "er")) as run:
        assert run.root == tmp_path / "deep" / "er" / "r"
        assert run.logs(1) == run.root / "logs" / "attempt_1"
        assert run.logs(1).is_dir()


def test_unnamed_runs_differ(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path, None)) as one, RunDir.create(config(tmp_path, None)) as other:
        assert re.fullmatch(r"envs-tiny-[0-9a-f]{8}", one.root.name)
        assert one.root != other.root


def test_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDir.create(config(Path("out"))) as run:
        assert run.root == tmp_path / "out" / "r"


def test_config_json_runs_again(tmp_path: Path) -> None:
    given = config(tmp_path, "r", "--clean", "--trainer.learning-rate", "2e-4", "--env.args.length", "5")
    with RunDir.create(given) as run:
        again = load(["@", str(run.config_json)], {}).config
    assert again.model_dump(exclude={"clean"}) == given.model_dump(exclude={"clean"})
    assert not again.clean  # running it again must not empty anything


@pytest.mark.parametrize("name", ["../x", "a/b", "/a", ".."])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    assert f"run.name = {name!r}" in refusal(config(tmp_path, name))
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    RunDir.create(config(tmp_path)).lock.close()


def test_a_directory_in_use_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path)).lock.close()
    text = refusal(config(tmp_path))
    assert str(tmp_path / "r") in text
    assert "another --run.name" in text
    assert "--clean" in text


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
    with RunDir.create(config(tmp_path, "r", "--clean")) as run:
        assert not (root / "logs").exists()
        assert not (root / "link").is_symlink()
        assert not run.metrics.exists()
        assert run.config_json.read_text() != "old"
    assert (outside / "old.txt").exists()


@pytest.mark.parametrize("flags", [[], ["--clean"]])
def test_a_living_driver_keeps_its_directory(tmp_path: Path, flags: list[str]) -> None:
    with RunDir.create(config(tmp_path)) as run:
        run.metrics.write_text("row")
        text = refusal(config(tmp_path, "r", *flags))
        assert run.metrics.read_text() == "row"
    assert f"pid {os.getpid()}" in text
    assert "another --run.name" in text


def test_the_lock_of_a_dead_driver_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from trireme.rundir import _locked\n"
        "root = Path(sys.argv[1]); root.mkdir(); lock = _locked(root); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "r")], check=False)
    assert (tmp_path / "r" / "driver.lock").read_text().startswith("pid ")
    with RunDir.create(config(tmp_path)) as run:
        assert f"pid {os.getpid()}" in (run.root / "driver.lock").read_text()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("x")
    assert "another --run.output-dir" in refusal(config(tmp_path))


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    assert "Not a directory" in refusal(config(Path("/dev/null")))


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the error that the system gives, since tests may run as root, which nothing stops."""

    def mkdir(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    text = refusal(config(tmp_path))
    assert "Permission denied" in text
    assert str(tmp_path / "r") in text


class TestCodeDiff:
    @pytest.fixture
    def checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A checkout with one commit and one change after it."""
        directory = tmp_path / "checkout"
        directory.mkdir()
        monkeypatch.chdir(directory)
        (directory / "a.txt").write_text("before\n")
        for command in ("init -q", "add a.txt", "-c user.name=n -c user.email=e commit -q -m m"):
            subprocess.run(["git", *command.split()], check=True)
        (directory / "a.txt").write_text("after\n")
        return directory

    def test_in_a_checkout(self, checkout: Path, tmp_path: Path) -> None:
        with RunDir.create(config(tmp_path / "out")) as run:
            diff = (run.root / "code.diff").read_text()
        assert re.match(r"commit [0-9a-f]{40}\n", diff)
        assert "-before\n+after\n" in diff

    def test_elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with RunDir.create(config(tmp_path / "out")) as run:
            assert not (run.root / "code.diff").exists()
