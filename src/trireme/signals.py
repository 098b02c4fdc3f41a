"""SIGTERM and Ctrl-C end a run in order: a commit is taken, rooms are stopped and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trireme.errors import EXIT_INTERRUPTED, EXIT_SIGTERM


class Stopped(BaseException):
    """A signal asked the run to end. Not an Exception: no room's error handling may swallow it."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("stopped by a signal")
        self.exit_code = exit_code


class GraceOver(Stopped):
    """A signal asked the run to end, and it came to no point where it could be committed within its grace time."""

    def __str__(self) -> str:
        return "stopped by a signal, without a commit: none was possible within checkpoint.grace_s"


EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_SIGTERM}
SAME_S = 1.0
"""A signal so soon after the first is the same one: whoever signals all processes of a job (a scheduler, `kill` of a
process group) signals a launcher like `uv run` too, which passes it on."""


def _end_at_the_next() -> None:
    """From now on a signal ends the process at once, unless it is the same that just came."""
    first = time.monotonic()

    def end(signum: int, _frame: FrameType | None) -> None:
        if time.monotonic() - first > SAME_S:
            os._exit(EXIT_CODES[signal.Signals(signum)])  # the cluster's processes share the driver's fate

    for each in EXIT_CODES:
        signal.signal(each, end)


def _stop(signum: int, _frame: FrameType | None) -> None:
    _end_at_the_next()
    raise Stopped(EXIT_CODES[signal.Signals(signum)])


def arm() -> None:
    """Makes both signals raise Stopped in the main thread; a second, later than SAME_S, ends the process at once. To
    be called again after `ray.init`, which sets its own."""
    for each in EXIT_CODES:
        signal.signal(each, _stop)


class Stop:
    """Whether a signal asked to stop, and when it is convenient to obey."""

    exit_code: int | None = None

    def asked(self) -> bool:
        """Whether a signal came."""
        return self.exit_code is not None

    def check(self) -> None:
        """Raises Stopped if a signal came: called where the run can be committed."""
        if self.exit_code is not None:
            raise Stopped(self.exit_code)


@contextmanager
def graceful(grace_s: float) -> Iterator[Stop]:
    """While training: the first signal is noted for `Stop.check`, and raises GraceOver where the main thread happens to
    be if the block has not ended `grace_s` seconds later. A second one, later than SAME_S, ends the process at once."""
    stop = Stop()

    def note(signum: int, _frame: FrameType | None) -> None:
        stop.exit_code = EXIT_CODES[signal.Signals(signum)]
        _end_at_the_next()
        signal.setitimer(signal.ITIMER_REAL, grace_s)

    def overdue(_signum: int, _frame: FrameType | None) -> None:
        assert stop.exit_code is not None
        raise GraceOver(stop.exit_code)

    signal.signal(signal.SIGALRM, overdue)
    for each in EXIT_CODES:
        signal.signal(each, note)
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if stop.exit_code is None:  # else a second signal still ends the process at once
            arm()
