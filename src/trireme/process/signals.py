"""SIGTERM and Ctrl-C end a run in order: a commit is taken, rooms are stopped and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trireme.core.errors import EXIT_INTERRUPTED, EXIT_SIGTERM, RoomFailed


class Stopped(BaseException):
    """A signal asked the run to end. Not an Exception: no room's error handling may swallow it."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("stopped by a signal")
        self.exit_code = exit_code


class GraceOver(Stopped):
    """A signal asked the run to end, and it came to no point where it could be committed within its grace time."""

    def __str__(self) -> str:
        return "stopped by a signal, without a commit: none was possible within checkpoint.grace_s"


class RoomLost(Stopped):
    """A signal asked the run to end, and before it could be committed one of its rooms failed."""

    def __init__(self, exit_code: int, failure: RoomFailed) -> None:
        super().__init__(exit_code)
        self.failure = failure

    def __str__(self) -> str:
        return f"stopped by a signal, without a commit: {self.failure}"


EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_SIGTERM}
SAME_S = 3.0
"""The same signal so soon after the first is no second one: whoever signals all processes of a job (a scheduler, `kill`
of a process group) signals a launcher like `uv run` too, which passes it on. More than twice `waits.TICK_S`: Python
hears of a signal only when the main thread is back from Ray, so of two at once the second may be late by as much."""
BOTH_S = 0.5
"""So soon after the first another one is no second one either: launchers turn Ctrl-C, which the terminal has sent to
all, into a SIGTERM."""


def _end_at_the_next(first: int) -> None:
    """From now on a signal ends the process at once, unless it comes with `first`, which just came."""
    came = time.monotonic()

    def end(signum: int, _frame: FrameType | None) -> None:
        if time.monotonic() - came > (SAME_S if signum == first else BOTH_S):
            os._exit(EXIT_CODES[signal.Signals(signum)])  # the cluster's processes share the driver's fate

    for each in EXIT_CODES:
        signal.signal(each, end)


def _stop(signum: int, _frame: FrameType | None) -> None:
    _end_at_the_next(signum)
    raise Stopped(EXIT_CODES[signal.Signals(signum)])


def arm() -> None:
    """Makes both signals raise Stopped in the main thread; a second (see SAME_S) ends the process at once. To be called
    again after `ray.init`, which sets its own."""
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
    be if the block has not ended `grace_s` seconds later. A second one (see SAME_S) ends the process at once.

    A room that fails once a signal came is not built anew: what the block raises becomes RoomLost."""
    stop = Stop()

    def note(signum: int, _frame: FrameType | None) -> None:
        stop.exit_code = EXIT_CODES[signal.Signals(signum)]
        _end_at_the_next(signum)
        signal.setitimer(signal.ITIMER_REAL, grace_s)

    def overdue(_signum: int, _frame: FrameType | None) -> None:
        assert stop.exit_code is not None
        raise GraceOver(stop.exit_code)

    signal.signal(signal.SIGALRM, overdue)
    for each in EXIT_CODES:
        signal.signal(each, note)
    try:
        yield stop
    except RoomFailed as failure:  # perhaps of the same signal, which whoever signals a whole group sends to rooms too
        if stop.exit_code is None:
            raise
        raise RoomLost(stop.exit_code, failure) from failure
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if stop.exit_code is None:  # else a second signal still ends the process at once
            arm()
