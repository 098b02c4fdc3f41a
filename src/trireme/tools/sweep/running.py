"""Runs the points of a grid, each in a process of its own. One that fails is recorded, and the others go on."""

from __future__ import annotations

import difflib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from trireme.checkpoint.files import storage_errors
from trireme.config.refusals import Refusal
from trireme.core.errors import EXIT_FAILED, EXIT_OK
from trireme.process.signals import EXIT_CODES
from trireme.tools.sweep.directory import MODULES, Sweep
from trireme.tools.sweep.request import USAGE, Run, read_request
from trireme.tools.sweep.table import Result

POLL_S = 0.2

Say = Callable[[str], None]


@dataclass
class Stopping:
    """Whether a signal came; each that comes is passed on to the runs under way, which commit and end."""

    runs: Mapping[str, subprocess.Popen[bytes]]
    exit_code: int | None = None

    def note(self, signum: int, _frame: FrameType | None) -> None:
        self.exit_code = EXIT_CODES[signal.Signals(signum)]
        for process in self.runs.values():
            if process.poll() is None:
                process.send_signal(signum)


@contextmanager
def stopping(runs: Mapping[str, subprocess.Popen[bytes]]) -> Iterator[Stopping]:
    stop = Stopping(runs)
    before = {each: signal.signal(each, stop.note) for each in EXIT_CODES}
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def main(words: Sequence[str]) -> int:
    """Runs `trireme sweep` with what stands behind it, and returns its exit code. Raises BadInput, StorageFailed."""
    if not words or "--help" in words or "-h" in words:
        print(USAGE)
        return EXIT_OK
    if words[0] not in MODULES:
        raise Refusal(f"trireme sweep {words[0]}", f"one of {', '.join(MODULES)}", USAGE).error()
    sweep = Sweep.open(read_request(words[0], words[1:]))
    code = run_all(sweep, lambda text: print(text, flush=True))
    sweep.tabulate()
    print((sweep.root / "table.md").read_text(), *(str(file) for file in sorted(sweep.root.glob("*.*"))), sep="\n")
    return code


def run_all(sweep: Sweep, say: Say) -> int:
    """Runs what is not done yet, at most `jobs` at a time; returns the exit code of the sweep.

    A run has deadlines of its own, so it is waited for as long as it takes.
    """
    waiting = [run for run in sweep.runs if sweep.results[run.name].code != EXIT_OK]
    under_way: dict[str, subprocess.Popen[bytes]] = {}
    started: dict[str, float] = {}
    say(f"{sweep.root}: {len(sweep.runs)} runs, {len(sweep.runs) - len(waiting)} done")
    with stopping(under_way) as stop:
        while under_way or (waiting and stop.exit_code is None):
            while waiting and len(under_way) < sweep.request.jobs and stop.exit_code is None:
                run = waiting.pop(0)
                under_way[run.name], started[run.name] = _start(sweep, run), time.monotonic()
                say(f"{run.name}: started; its output: {sweep.log(run)}")
            for name in [name for name, process in under_way.items() if process.poll() is not None]:
                code = under_way.pop(name).returncode
                result = _ended(sweep, name, code, time.monotonic() - started[name])
                sweep.record(result)
                say(f"{name}: {result.state} after {result.seconds:.0f} s{_metric_text(sweep, result)}")
            time.sleep(POLL_S)
    if stop.exit_code is not None:
        return stop.exit_code
    return EXIT_OK if all(result.code == EXIT_OK for result in sweep.results.values()) else EXIT_FAILED


def _start(sweep: Sweep, run: Run) -> subprocess.Popen[bytes]:
    with storage_errors(sweep.log(run)), sweep.log(run).open("ab") as log:
        # A session of its own: Ctrl-C comes to the sweep alone, which passes it on once.
        return subprocess.Popen(
            sweep.command(run), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _ended(sweep: Sweep, name: str, code: int, seconds: float) -> Result:
    error = "" if code == EXIT_OK else last_error((sweep.root / "logs" / f"{name}.log").read_text(errors="replace"))
    return replace(sweep.results[name], code=code, seconds=seconds, error=error)


def last_error(log: str) -> str:
    """What a run said last when it failed: from its last error on, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]


def _metric_text(sweep: Sweep, result: Result) -> str:
    """The metric; where no row has it, what may have been meant."""
    metric, wanted = sweep.outcome(result).metric, sweep.request.metric
    if metric is not None:
        return f", {wanted} {metric:.4g}"
    names = {name for row in sweep.rows(result.name) for name in row}
    near = difflib.get_close_matches(wanted, names, n=3)
    return f"; none of its rows has {wanted}" + (f" (there is {', '.join(near)})" if near else "") if names else ""
