"""Runs each part in a process of its own, with a deadline, and ends what hangs."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from gpu_check.checks import FAILURE, NOT_RUN, Outcome

SCRIPTS = Path(__file__).parents[1]
SHARES = {"trainer": 0.4, "engine": 0.25, "system": 0.25, "several": 0.1}
"""The parts, and the share of the time that each may take if all run."""
MARK = "TRIREME_GPU_CHECK"
END_S = 10.0


def run_part(module: str, device: str, seconds: float, log: Path) -> list[Outcome]:
    """Returns how each of CHECKS of a part's module ended. What it prints goes to `log`. After `seconds` its processes
    are killed: the check that ran is a failure, which says so, and later ones did not run."""
    part = module.rpartition(".")[2]
    mark = uuid.uuid4().hex
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as directory:
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpu_check.worker", module, device, str(seconds), directory],
                env={**os.environ, MARK: mark, "PYTHONPATH": _python_path(), "HF_HUB_OFFLINE": "1"},
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        outcomes, running, late = _read(process, started + seconds)
        _end(process, mark, 0.0 if late else END_S)
    names = [check.name for check in import_module(module).CHECKS]
    if running:
        took = time.monotonic() - started
        if late:
            reason = f"the part was ended after {seconds:.0f} s"
        else:
            reason = f"its process ended ({_how(process)})"
        outcomes.append(
            Outcome(part, running, FAILURE, f"{reason} while it waited for this check; see {log}", {}, took)
        )
    finished = {outcome.check for outcome in outcomes}
    reason = f"the part ended before it{f', at {running}' if running else f' ({_how(process)}); see {log}'}"
    return [*outcomes, *(Outcome(part, name, NOT_RUN, reason) for name in names if name not in finished)]


def _read(process: subprocess.Popen[bytes], deadline: float) -> tuple[list[Outcome], str, bool]:
    """Reads until the part has ended or is late. Returns the outcomes, the check that was running then, and True if it
    was late."""
    assert process.stdout is not None
    outcomes = []
    running = ""
    rest = b""
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while remaining_s := max(0.0, deadline - time.monotonic()):
            if not ready.select(remaining_s):
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return outcomes, running, False
            *lines, rest = (rest + data).split(b"\n")
            for message in map(json.loads, lines):
                running = message.get("begin", "")
                outcomes += [] if running else [Outcome(**message)]
    return outcomes, running, True


def _end(process: subprocess.Popen[bytes], mark: str, patience_s: float) -> None:
    """Waits for the part to end by itself, then kills its remaining processes."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    deadline = time.monotonic() + END_S
    while (alive := _marked(mark)) and time.monotonic() < deadline:
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    process.wait(END_S)


def _marked(mark: str) -> list[int]:
    """Returns the living processes that inherited `mark`."""
    texts = []
    for entry in filter(lambda entry: entry.name.isdigit(), Path("/proc").iterdir()):
        with suppress(OSError):  # it ended while we looked, or is another user's
            zombie = b"State:\tZ" in (entry / "status").read_bytes()
            if not zombie and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                texts.append(int(entry.name))
    return texts


def _how(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _python_path() -> str:
    """Returns where the worker finds these modules and the project, installed or not."""
    paths = [str(SCRIPTS), str(SCRIPTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))


def run_parts(parts: Sequence[str], device: str, seconds: float, logs: Path) -> list[Outcome]:
    """Runs `parts` within `seconds`. Each gets its share of the remaining time, so later ones get the time that earlier
    ones spare.
    """
    deadline = time.monotonic() + seconds
    outcomes = []
    for number, part in enumerate(parts):
        share = SHARES[part] / sum(SHARES[other] for other in parts[number:])
        remaining_s = max(1.0, deadline - time.monotonic())
        print(f"{part}: at most {remaining_s * share:.0f} s, prints to {logs / part}.log", file=sys.stderr, flush=True)
        outcomes += run_part(f"gpu_check.{part}", device, remaining_s * share, logs / f"{part}.log")
    return outcomes
