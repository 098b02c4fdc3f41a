"""Sweeps: the grid that is asked for, what is run and what is not run again, failures, signals, table and plot. The
runs are stand-ins (`fake_run.py`) in processes of their own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from config_support import REQUIRED, refused
from waiting import wait_for

from trireme.cli import sweep as sweeps
from trireme.cli.sweep import Sweep, main, name_of, parse, run_all
from trireme.core.errors import EXIT_FAILED, EXIT_OK, EXIT_SIGTERM

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sweeps.MODULES, "rl", "fake_run")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    monkeypatch.setattr(sweeps, "POLL_S", 0.01)


def words(tmp_path: Path, *extra: str) -> list[str]:
    return [*REQUIRED, "--run.output-dir", str(tmp_path), "--name", "s", "--metric", "reward/total", *extra]


def opened(arguments: list[str]) -> Sweep:
    return Sweep(*parse(["rl", *arguments]))


def swept(tmp_path: Path, *extra: str) -> tuple[int, Sweep]:
    sweep = opened(words(tmp_path, *extra))
    return run_all(sweep), sweep


def starts(tmp_path: Path) -> list[str]:
    (file,) = tmp_path.glob("s-*/starts.txt")
    return file.read_text().splitlines()


class TestCommandLine:
    def test_the_rest_is_that_of_each_run_which_has_a_name_of_its_own(self) -> None:
        options, base = parse(["rl", "@", "f.toml", "--grid", "seed=0,1", "--a.b", "c", "--metric=m", "--jobs", "2"])
        assert base == ["@", "f.toml", "--a.b", "c"]
        assert (options.kind, options.metric, options.jobs, options.window) == ("rl", "m", 2, 1)
        names = [name_of({"a.rate": rate, "env.args": args}) for rate in "12" for args in ('{"a": 1}', '{"a": 2}')]
        assert len(set(names)) == 4
        assert names[0].startswith("a.rate=1,env.args=")
        assert all("/" not in name and '"' not in name for name in names)
        assert name_of({"seed": "0"}) == "seed=0"

    @pytest.mark.parametrize(
        ("text", "key", "texts"),
        [
            ("trainer.learning-rate=1e-4,2e-4", "trainer.learning_rate", ["1e-4", "2e-4"]),
            ('k=[{"a": 1}, "x"]', "k", ['{"a": 1}', "x"]),
            ("--k=none", "k", ["none"]),
        ],
    )
    def test_values(self, text: str, key: str, texts: list[str]) -> None:
        options, _ = parse(["rl", f"--grid={text}", "--metric", "m"])
        assert options.grid == [(key, texts)]

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["--metric", "m"], "--grid"),
            (["--grid", "seed=0"], "--metric"),
            (["--grid", "seed", "--metric", "m"], "KEY=VALUE"),
            (["--grid", "seed=0,,1", "--metric", "m"], "KEY=VALUE"),
            (["--grid", "seed=0,0", "--metric", "m"], "each value once"),
            (["--grid", "seed=[]", "--metric", "m"], "KEY=VALUE"),
            (["--grid", "seed=0", "--metric", "m", "--jobs", "0"], "at least 1"),
            (["--grid", "seed=0", "--metric"], "--metric"),
        ],
    )
    def test_bad_options_are_refused(self, arguments: list[str], reason: str) -> None:
        assert reason in refused(lambda: parse(["rl", *arguments]))


class TestRunning:
    GRID = ("--grid", "trainer.learning-rate=1,2", "--grid", "seed=0,1")

    def test_a_grid_becomes_a_table_and_a_plot(self, tmp_path: Path) -> None:
        code, sweep = swept(tmp_path, *self.GRID, "--jobs", "2")
        assert code == EXIT_OK
        lines = (sweep.root / "table.md").read_text().splitlines()[2:]
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert header == ["trainer.learning_rate", "seed", "reward/total", "steps", "seconds", "state", "run"]
        assert [(row[:3], row[5]) for row in rows] == [
            (["1", "0", "1000"], "done"),
            (["1", "1", "1001"], "done"),
            (["2", "0", "2000"], "done"),
            (["2", "1", "2001"], "done"),
        ]
        drawn = (sweep.root / "plot.svg").read_text()
        assert drawn.count("<use ") >= 4, "a dot for each run"
        assert "reward/total by trainer.learning_rate" in drawn

    def test_a_run_that_fails_is_recorded_and_the_others_go_on(self, tmp_path: Path) -> None:
        grid = ("--grid", "trainer.learning-rate=3,1")
        code, sweep = swept(tmp_path, *grid)
        assert code == EXIT_FAILED
        assert [result["code"] for result in sweep.results.values()] == [2, 0]
        assert "exit code 2: given: a rate of 3" in (sweep.root / "table.md").read_text()
        (sweep.root / "mended").touch()
        assert swept(tmp_path, *grid)[0] == EXIT_OK
        assert [line.rpartition("=")[2] for line in starts(tmp_path)] == ["3 new", "1 new", "3 again"]

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            (["--grid", "trainer.learning-rat=1"], "trainer.learning-rate"),
            (["--grid", "trainer.shards=1,two"], "two"),
            (["--grid", "seed=0", "--resume"], "it continues"),
            (["--grid", "seed=0", "--clean"], "it continues"),
            (["--grid", "seed=0", "--run.output-dir", "s3://bucket/runs"], "object storage"),
        ],
    )
    def test_bad_input_is_refused_before_any_run(self, extra: list[str], message: str, tmp_path: Path) -> None:
        assert message in refused(lambda: swept(tmp_path, *extra))
        assert list(tmp_path.iterdir()) == []

    def test_why_a_run_has_no_result_is_shown(self, tmp_path: Path) -> None:
        arguments = [*words(tmp_path, "--grid", "seed=0"), "--metric", "reward/totl"]
        sweep = opened(arguments)
        assert run_all(sweep) == EXIT_FAILED
        assert "no row of metrics.jsonl has reward/totl" in (sweep.root / "table.md").read_text()
        arguments[-1] = "reward/total"
        assert run_all(opened(arguments)) == EXIT_OK
        assert starts(tmp_path) == ["seed=0 new"], "a finished run is not repeated"
        sweep.log("seed=0").write_text("a\nerror: given: x\n  expected: y\nlater\n")
        assert sweep.last_line("seed=0") == "given: x"
        sweep.log("seed=0").write_text("Traceback\nValueError: z\n\n")
        assert sweep.last_line("seed=0") == "ValueError: z"

    def test_a_dry_run_records_nothing_and_no_run_is_repeated(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["rl", *words(tmp_path, "--grid", "seed=0,1")]
        assert main([*arguments, "--dry-run"]) == EXIT_OK
        out = capfd.readouterr().out
        assert "2 runs\n  seed=0: not run\n  seed=1: not run\n" in out
        assert "the plan of seed 0" in out
        assert list(tmp_path.iterdir()) == []
        assert main(arguments) == EXIT_OK
        assert starts(tmp_path) == ["seed=0 new", "seed=1 new"]
        assert swept(tmp_path, "--grid", "seed=0,1,2")[0] == EXIT_OK  # a larger grid is the same sweep
        assert starts(tmp_path) == ["seed=0 new", "seed=1 new", "seed=2 new"]


def test_a_signal_is_passed_on_and_the_sweep_goes_on_later(tmp_path: Path) -> None:
    """The sweep in a process of its own: SIGTERM ends the run under way, starts no other, and its code is that of a
    run."""
    arguments = words(tmp_path, "--grid", "trainer.learning-rate=4,1")
    script = (
        "import sys; from trireme.cli import sweep; sweep.MODULES['rl'] = 'fake_run';"
        "sys.exit(sweep.main(['rl', *sys.argv[1:]]))"
    )
    process = subprocess.Popen([sys.executable, "-c", script, *arguments], env=os.environ, stdout=subprocess.PIPE)
    wait_for(lambda: list(tmp_path.glob("s-*/trainer.learning_rate=4/ready")), "the first run", 120)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_SIGTERM, out
    (file,) = tmp_path.glob("s-*/sweep.json")
    assert [result["code"] for result in json.loads(file.read_bytes()).values()] == [EXIT_SIGTERM, None]
    assert swept(tmp_path, "--grid", "trainer.learning-rate=4,1")[0] == EXIT_OK
    assert [line.rpartition("=")[2] for line in starts(tmp_path)] == ["4 new", "4 again", "1 new"]
