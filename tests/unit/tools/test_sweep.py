"""Sweeps: the grid that is asked for, what is run and what is not run again, failures, signals, table and plot. The
runs are stand-ins (`fake_run.py`) in processes of their own."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trireme.core.errors import EXIT_FAILED, EXIT_OK, EXIT_SIGTERM, BadInput
from trireme.tools import sweep as sweeps
from trireme.tools.sweep import Request, Sweep, last_error, main, read_request, run_all

HERE = Path(__file__).parents[1] / "support"
BASE = [
    "--model.name",
    "m",
    "--env.id",
    "sort",
    "--orchestrator.batch-size",
    "2",
    "--inference.sampling.max-tokens",
    "3",
]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sweeps.MODULES, "rl", "fake_run")
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    monkeypatch.setattr(sweeps, "POLL_S", 0.01)


def words(tmp_path: Path, *more: str) -> list[str]:
    return [*BASE, "--run.output-dir", str(tmp_path), "--name", "s", "--metric", "reward/total", *more]


def swept(tmp_path: Path, *more: str) -> tuple[int, Sweep]:
    sweep = Sweep.open(read_request("rl", words(tmp_path, *more)))
    return run_all(sweep, lambda _: None), sweep


def starts(tmp_path: Path) -> list[str]:
    return (tmp_path / "s" / "starts.txt").read_text().splitlines()


def grid(texts: dict[str, tuple[str, ...]]) -> Request:
    return Request("rl", (), texts, "m", 1, 1, None, next(iter(texts)))


class TestRequest:
    def test_the_rest_is_that_of_each_run(self) -> None:
        request = read_request("rl", ["@", "f.toml", "--grid", "seed=0,1", "--a.b", "c", "--metric=m", "--jobs", "2"])
        assert request.base == ("@", "f.toml", "--a.b", "c")
        assert (request.metric, request.jobs, request.window) == ("m", 2, 1)

    @pytest.mark.parametrize(
        ("text", "texts"),
        [("k=1e-4,2e-4", ("1e-4", "2e-4")), ('k=[{"a": 1}, "x"]', ('{"a": 1}', "x")), ("k=none", ("none",))],
    )
    def test_values(self, text: str, texts: tuple[str, ...]) -> None:
        assert read_request("rl", ["--grid", text, "--metric", "m"]).grid == {"k": texts}

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (["--metric", "m"], "--grid"),
            (["--grid", "seed=0"], "--metric"),
            (["--grid", "seed", "--metric", "m"], "KEY=VALUE"),
            (["--grid", "seed=0,,1", "--metric", "m"], "KEY=VALUE"),
            (["--grid", "seed=0,0", "--metric", "m"], "each value once"),
            (["--grid", "seed=[1", "--metric", "m"], "JSON"),
            (["--grid", "seed=0", "--metric", "m", "--jobs", "0"], "at least 1"),
            (["--grid", "seed=0", "--metric", "m", "--knob", "x"], "one of the grid's: seed"),
            (["--grid", "seed=0", "--metric"], "without a value"),
            (["--grid", "seed=0", "--metric", "m", "--metric", "n"], "one of them"),
        ],
    )
    def test_is_refused(self, given: list[str], said: str) -> None:
        with pytest.raises(BadInput, match="given: ") as refused:
            read_request("rl", given)
        assert said in str(refused.value)

    def test_every_combination_has_a_name_of_its_own(self) -> None:
        runs = grid({"trainer.learning_rate": ("1e-4", "2e-4"), "env.args": ('{"a": 1}', '{"a": 2}')}).runs()
        assert len(runs) == 4
        assert next(iter(runs)).startswith("learning_rate=1e-4,args=")
        assert all("/" not in name and '"' not in name for name in runs)

    def test_keys_that_end_alike_are_written_out(self) -> None:
        assert list(grid({"run.name": ("a",), "wandb.name": ("b",)}).runs()) == ["run.name=a,wandb.name=b"]


class TestRunning:
    GRID = ("--grid", "trainer.learning-rate=1,2", "--grid", "seed=0,1")

    def test_a_grid_becomes_a_table_and_a_plot(self, tmp_path: Path) -> None:
        code, sweep = swept(tmp_path, *self.GRID, "--jobs", "2")
        assert code == EXIT_OK
        with (sweep.root / "table.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [row["reward/total"] for row in rows] == ["1000", "1001", "2000", "2001"]
        assert [(row["trainer.learning_rate"], row["seed"]) for row in rows] == [
            ("1", "0"),
            ("1", "1"),
            ("2", "0"),
            ("2", "1"),
        ]
        assert {row["state"] for row in rows} == {"done"}
        assert "| 2 | 1 | 2001 | 2 |" in (sweep.root / "table.md").read_text()
        drawn = (sweep.root / "plot.svg").read_text()
        assert drawn.count("<use ") >= 4, "a dot for each run"
        assert "reward/total by trainer.learning_rate" in drawn

    def test_finished_runs_are_not_repeated(self, tmp_path: Path) -> None:
        swept(tmp_path, "--grid", "seed=0,1")
        assert swept(tmp_path, "--grid", "seed=0,1,2")[0] == EXIT_OK  # a larger grid is the same sweep
        assert starts(tmp_path) == ["seed=0 new", "seed=1 new", "seed=2 new"]

    def test_a_mean_of_the_last_values(self, tmp_path: Path) -> None:
        _, sweep = swept(tmp_path, "--grid", "trainer.learning-rate=1", "--window", "2")
        assert sweep.metric(next(iter(sweep.results))) == 999.5

    def test_a_run_that_fails_is_recorded_and_the_others_go_on(self, tmp_path: Path) -> None:
        grid = ("--grid", "trainer.learning-rate=3,1")
        code, sweep = swept(tmp_path, *grid)
        assert code == EXIT_FAILED
        assert [result.code for result in sweep.results.values()] == [2, 0]
        assert "exit code 2: given: a rate of 3" in (sweep.root / "table.md").read_text()
        (sweep.root / "mended").touch()
        assert swept(tmp_path, *grid)[0] == EXIT_OK
        assert starts(tmp_path) == ["learning_rate=3 new", "learning_rate=1 new", "learning_rate=3 again"]

    def test_another_configuration_is_refused(self, tmp_path: Path) -> None:
        swept(tmp_path, "--grid", "seed=0")
        with pytest.raises(BadInput, match=r"trainer\.shards: 1 before, 2 now") as refused:
            swept(tmp_path, "--grid", "seed=0", "--trainer.shards", "2")
        assert "--name" in str(refused.value)

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            (["--grid", "trainer.learning-rat=1"], "trainer.learning_rate"),
            (["--grid", "trainer.shards=1,two"], "two"),
            (["--grid", "seed=0", "--resume"], "it continues"),
            (["--grid", "seed=0", "--clean"], "it continues"),
        ],
    )
    def test_bad_input_is_refused_before_any_run(self, more: list[str], said: str, tmp_path: Path) -> None:
        with pytest.raises(BadInput) as refused:
            swept(tmp_path, *more)
        assert said in str(refused.value)
        assert list(tmp_path.iterdir()) == []

    def test_a_directory_of_something_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "s").mkdir()
        (tmp_path / "s" / "mine").touch()
        with pytest.raises(BadInput, match="no sweep"):
            swept(tmp_path, "--grid", "seed=0")

    def test_a_metric_that_no_row_has(self, tmp_path: Path) -> None:
        said: list[str] = []
        given = [*BASE, "--run.output-dir", str(tmp_path), "--grid", "seed=0", "--metric", "reward/totl"]
        sweep = Sweep.open(read_request("rl", given))
        assert run_all(sweep, said.append) == EXIT_FAILED
        told = "no such metric: no row has reward/totl, but there is reward/total"
        assert told in said[-1]
        assert told in (sweep.root / "table.csv").read_text()
        given[-1] = "reward/total"  # the runs are done, and are not repeated
        assert run_all(Sweep.open(read_request("rl", given)), said.append) == EXIT_OK

    def test_a_dry_run_shows_the_runs_and_a_plan_and_records_nothing(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        given = ["rl", *words(tmp_path, "--grid", "seed=0,1")]
        assert main([*given, "--dry-run"]) == EXIT_OK
        out = capfd.readouterr().out
        assert "2 runs\n  seed=0: not run\n  seed=1: not run\n" in out
        assert "the plan of seed 0" in out
        assert list(tmp_path.iterdir()) == []
        assert main(given) == EXIT_OK
        assert starts(tmp_path) == ["seed=0 new", "seed=1 new"]

    def test_a_run_that_takes_long_is_told_of(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sweeps, "PROGRESS_S", 0.0)
        said: list[str] = []
        run_all(Sweep.open(read_request("rl", words(tmp_path, "--grid", "seed=0"))), said.append)
        assert any(line.startswith("seed=0: nothing printed yet (") for line in said)


def test_a_sweep_needs_a_directory(tmp_path: Path) -> None:
    given = [*words(tmp_path, "--grid", "seed=0"), "--run.output-dir", "s3://bucket/runs"]
    with pytest.raises(BadInput, match=r"a sweep with run\.output_dir = s3"):
        Sweep.open(read_request("rl", given))


def test_a_signal_is_passed_on_and_the_sweep_goes_on_later(tmp_path: Path) -> None:
    """The sweep in a process of its own: SIGTERM ends the run under way, starts no other, and its code is that of a
    run."""
    given = words(tmp_path, "--grid", "trainer.learning-rate=4,1")
    script = (
        "import sys; from trireme.tools import sweep; sweep.MODULES['rl'] = 'fake_run';"
        "sys.exit(sweep.main(['rl', *sys.argv[1:]]))"
    )
    process = subprocess.Popen([sys.executable, "-c", script, *given], env=os.environ, stdout=subprocess.PIPE)
    ready = tmp_path / "s" / "learning_rate=4" / "ready"
    deadline = time.monotonic() + 120
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_SIGTERM, out
    recorded = json.loads((tmp_path / "s" / "results.json").read_bytes())
    assert [result["code"] for result in recorded] == [EXIT_SIGTERM, None]
    assert swept(tmp_path, "--grid", "trainer.learning-rate=4,1")[0] == EXIT_OK
    assert starts(tmp_path) == ["learning_rate=4 new", "learning_rate=4 again", "learning_rate=1 new"]


def test_the_last_words_of_a_run() -> None:
    assert last_error("a\nerror: given: x\n  expected: y\nlater\n") == "given: x"
    assert last_error("Traceback\nValueError: z\n\n") == "ValueError: z"
    assert last_error("") == ""
