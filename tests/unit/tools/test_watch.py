"""`trireme watch` in a terminal: what it shows of a run, and when it ends."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from cli_support import refused
from rich.console import Console
from supervision_support import roster_of

from trireme.core.errors import EXIT_INTERRUPTED
from trireme.supervision.roster import PartHealth
from trireme.supervision.status import Status, StatusWriter
from trireme.tools import watch as watching
from trireme.tools.curves import RunCurves
from trireme.tools.watch import NEWEST_INCIDENTS, drawing, watch

NOW = datetime.fromtimestamp(1_800_000_090, UTC)
RUNNING = f"running, process {os.getpid()}"


def rows(first: int, last: int) -> str:
    return "".join(
        json.dumps({"step": step, "attempt": 1, "reward/total": step / 10, "time/step": 0.25}) + "\n"
        for step in range(first, last)
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_steps": 10}))
    (tmp_path / "metrics.jsonl").write_text(rows(0, 3))
    return tmp_path


def supervised(run: Path, incidents: int = 1) -> None:
    """Writes a STATUS in which a replica serves and another one is dead."""
    roster = roster_of(PartHealth.HEALTHY, PartHealth.DEAD)
    roster.at_step(2)
    roster.set("inference_1", PartHealth.DEAD, "its engine [101] was killed")
    with StatusWriter(run, roster):
        for number in range(incidents):
            roster.note("inference_1", f"its engine [101] was killed; successor {number} starts")
    status = json.loads((run / "STATUS").read_text())
    (run / "STATUS").write_text(json.dumps(status | {"ended": None}))


def screen(run: Path, driver: str = "not running", now: datetime = NOW) -> str:
    curves = RunCurves(run)
    curves.look()
    console = Console(width=200, file=io.StringIO())
    console.print(drawing(run, curves, driver, now))
    return console.file.getvalue()


def test_where_it_stands_reward_parts_and_incidents(run: Path) -> None:
    supervised(run)
    text = screen(run)
    assert text.splitlines()[0] == f"{run.name}  step 3/10  attempt 1  reward 0.200  not running"
    assert "the driver was killed" in text.splitlines()[1]
    (reward,) = [line.split() for line in text.splitlines() if "reward/total" in line]
    assert reward == ["reward/total", "0.2", "0.1"]
    (dead,) = [line for line in text.splitlines() if line.startswith(" inference_1")]
    assert dead.split()[1:6] == ["dead", "1", "min", "ago", "101"]
    assert "its engine [101] was killed" in dead
    assert "1 min ago  attempt 1, step 2  inference_1: its engine [101] was killed; successor 0 starts" in text
    status = Status.read(run)
    at = datetime.fromtimestamp(status.at + 1, UTC)
    assert "inference_1 dead" in screen(run, RUNNING, at).splitlines()[1]


def test_the_newest_incidents_first(run: Path) -> None:
    supervised(run, NEWEST_INCIDENTS + 2)
    lines = screen(run).splitlines()
    shown = [line.rpartition("successor ")[2] for line in lines if "successor " in line]
    assert shown == [f"{number} starts" for number in range(NEWEST_INCIDENTS + 1, 1, -1)]
    assert lines[-1] == "2 older ones are in incidents.jsonl"


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    text = screen(tmp_path, "not started")
    assert text.startswith(f"{tmp_path.name}  step 0/?  not started")
    assert "has not begun" in text
    assert "no incidents" in text


def test_it_follows_a_run_to_its_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(["running, process 1", "running, process 1", "not running"])
    monkeypatch.setattr(watching, "driver_state", lambda root: next(states))
    steps = iter([rows(3, 4), rows(4, 5)])

    def write_more(_seconds: float) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(next(steps))

    monkeypatch.setattr(watching.time, "sleep", write_more)
    console = Console(width=120, force_terminal=True, file=io.StringIO())
    watch(run, console)
    text = console.file.getvalue()
    places = [text.index(f"step {step}/10") for step in (3, 4, 5)]
    assert places == sorted(places)
    assert "reward 0.400  not running" in text


def test_without_a_terminal_a_finished_run_is_printed_once(run: Path) -> None:
    command: list[Any] = [sys.executable, "-m", "trireme.cli.trireme", "watch", run]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert process.stdout.count("step 3/10") == 1
    assert "\x1b" not in process.stdout


START_S = 60.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "8000"], "--port without --web"),
        (["--host", "0.0.0.0", "--keys", "k"], "--host --keys without --web"),
        (["--web", "--port", "65536"], "--port 65536"),
        (["--web", "--keys", "/nowhere/keys"], "/nowhere/keys"),
    ],
)
def test_what_is_refused(tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert message in refused(capsys, "watch", tmp_path, *options)
    assert "give outputs/sort" in refused(capsys, "watch", "s3://bucket/runs/sort", "--web")


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "trireme.cli.trireme", "watch", str(tmp_path), "--web", "--port", "0"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        ready, _, _ = select.select([running.stdout], [], [], START_S)
        assert ready, f"the command printed no address within {START_S:g} s"
        address = re.search(r"http://127\.0\.0\.1:\d+/console/", running.stdout.readline())
        with urlopen(f"{address[0]}api/run", timeout=START_S) as reply:
            assert json.load(reply)["run"] == tmp_path.name
        os.kill(running.pid, signal.SIGINT)
        assert running.wait(START_S) == EXIT_INTERRUPTED
        assert running.stderr.read() == ""
    finally:
        running.kill()
        running.wait(START_S)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
