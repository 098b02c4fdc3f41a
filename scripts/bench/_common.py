"""Shared by the benchmarks: runs commands one at a time, counts CPU seconds per process, prints the result."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
POLL_S = 0.02
DEADLINE_S = 900.0
STOP_S = 30.0
TAIL_LINES = 30

ROOMS = (
    ("VLLM::EngineCore", "engine core"),
    ("ray::ShardActor", "trainer shard"),
    ("ray::OrchestratorActor", "orchestrator"),
    ("ray::Replica", "replica actor"),
    ("ray::ServiceActor", "service"),
    ("gcs_server", "ray gcs"),
    ("raylet/raylet", "ray raylet"),
    ("ray::", "ray idle worker"),
    ("/ray/", "ray service"),
)
"""Parts of a process title or command line, and who it is; the first that matches counts."""


@dataclass(frozen=True)
class Result:
    """One benchmark. `ratio` = `value` over the same of what it is measured `against`; `holds`: the target is met
    (None: there is none). `value` and `ratio` are None if only something else was measured, which is in `detail`."""

    name: str
    value: float | None
    unit: str
    ratio: float | None
    target: float | None
    holds: bool | None
    against: str
    detail: Mapping[str, object]

    def print(self) -> None:
        """The last line of a benchmark's output: one JSON object."""
        print(json.dumps(asdict(self)), flush=True)


@dataclass(frozen=True)
class RunMeasured:
    """One training run: wall seconds from the command to the first completed step and to the end, CPU seconds of each
    process by room at the moment of that step, the machine's load just before, and all rows of its metrics."""

    first_step_s: float
    total_s: float
    cpu_s: Mapping[str, Sequence[float]]
    load_before: float
    rows: Sequence[Mapping[str, float]]

    @property
    def total_cpu_s(self) -> float:
        return sum(sum(seconds) for seconds in self.cpu_s.values())


def cpu_seconds(process: psutil.Process) -> float:
    """Returns the CPU seconds of a process so far, with its ended children."""
    times = process.cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def titled(process: psutil.Process) -> str:
    """Returns the part of the system that a process is, by its title."""
    line = " ".join(process.cmdline()) or process.name()
    return next((room for part, room in ROOMS if part in line), f"other ({process.name()})")


def room_of(process: psutil.Process) -> str:
    """Returns the part that a descendant of the driver is. A forked engine has the title of its parent, the replica."""
    room = titled(process)
    parent = process.parent()
    if room == "replica actor" and parent and titled(parent) == room:
        return "engine core"
    return room


def cpu_by_room(driver: psutil.Process) -> dict[str, list[float]]:
    """CPU seconds of the driver and of every process below it, Ray's included, largest first within a room."""
    seconds_by_room: dict[str, list[float]] = defaultdict(list, {"driver": [round(cpu_seconds(driver), 2)]})
    for process in driver.children(recursive=True):
        try:
            seconds_by_room[room_of(process)].append(round(cpu_seconds(process), 2))
        except psutil.NoSuchProcess:  # it ended while we looked; its time is in its parent's
            continue
    return {room: sorted(seconds, reverse=True) for room, seconds in seconds_by_room.items()}


def run_rl(
    config: Path,
    *flags: str,
    directory: Path | None = None,
    first_step: int = 0,
    then: Callable[[psutil.Process], None] | None = None,
) -> RunMeasured:
    """Runs `rl @ config` as the run `run` in `directory` (none: one of its own), and measures it until `first_step` is
    done, when `then` is called with the driver, and to its end. Raises RuntimeError when it fails."""
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        metrics = (directory or Path(temporary)) / "run" / "metrics.jsonl"
        place = ["--run.output-dir", str(directory or temporary), "--run.name", "run"]
        command = [sys.executable, "-m", "trireme.cli.rl", "@", str(config), *place, *flags]
        load_before = os.getloadavg()[0]
        log = Path(temporary) / "output.txt"
        started_unix = time.time()
        started = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            first_row = wait_for_row(process, metrics, first_step, log, started + DEADLINE_S)
            cpu_s = cpu_by_room(psutil.Process(process.pid))
            if then:
                then(psutil.Process(process.pid))
            code = process.wait(max(started + DEADLINE_S - time.monotonic(), 1.0))
            total_s = time.monotonic() - started
        finally:
            stop(process)
        if code:
            raise failed(command, f"ended with exit code {code}", log)
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return RunMeasured(first_row["time/unix"] - started_unix, total_s, cpu_s, load_before, rows)


def wait_for_row(
    process: subprocess.Popen[bytes], metrics: Path, step: int, log: Path, deadline: float
) -> dict[str, float]:
    """Returns the row of `step`, once it is written. Raises RuntimeError when the run ends before or is late."""
    while time.monotonic() < deadline:
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        if len(lines) > step and lines[step].endswith("\n"):
            return json.loads(lines[step])
        if process.poll() is not None:
            raise failed(process.args, f"ended with exit code {process.returncode} before step {step}", log)
        time.sleep(POLL_S)
    raise failed(process.args, f"had not done step {step} after {DEADLINE_S:.0f} s", log)


def failed(command: Any, task: str, log: Path) -> RuntimeError:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
    return RuntimeError(f"{' '.join(map(str, command))} {task}; its last output:\n{tail}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a command that is still running, in its own orderly way (SIGTERM), and its remaining processes by force."""
    if process.poll() is not None:
        return
    tree = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs([psutil.Process(process.pid), *tree], timeout=STOP_S)
    for survivor in alive:
        survivor.kill()
    process.wait(STOP_S)


def run_for_json(command: Sequence[str], environ: Mapping[str, str]) -> tuple[float, dict[str, Any]]:
    """Runs a command until it prints a line that is a JSON object: wall seconds until then, and the object.

    The command's own ending is waited for, but not timed. Raises RuntimeError when it ends without such a line.
    """
    started = time.monotonic()
    with tempfile.NamedTemporaryFile(prefix="bench-", suffix=".txt") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=errors
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(b"{"):
                    seconds = time.monotonic() - started
                    process.stdout.read()
                    process.wait(DEADLINE_S)
                    return seconds, json.loads(line)
            process.wait(STOP_S)
        finally:
            stop(process)
        raise failed(command, f"ended with exit code {process.returncode} and reported nothing", Path(errors.name))


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)
