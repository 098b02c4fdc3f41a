"""Handles SIGTERM and Ctrl-C, which end a run in order.

    signal    `Stop` notes it, prints a line, and sets an alarm for `checkpoint.grace_s` seconds
    boundary  the driver works on to the next place where the run can be saved: between two steps, or within a step that
              has not changed the weights; there `Attempt.check` raises Stopped (`trireme.train.steps`, called by
              `trireme.train.phases`)
    saved     `trireme.run.checkpoints.Checkpoints.__exit__` takes a checkpoint, unless this version has one
    ended     rooms, replicas and Ray stop (`trireme.launch.run`), and the command prints the command that resumes;
              its exit code is 75 after SIGTERM, 130 after Ctrl-C (`trireme.cli.common.run_command`)

If the alarm comes first, or a room fails meanwhile, StoppedWithoutCheckpoint ends the run in the same way, without a
checkpoint. Before and after training a signal raises Stopped at once (`arm`). A second signal ends the process
immediately, and its actors with it. An actor that gets SIGTERM itself closes its environments first (`end_after`).
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from trireme.core.errors import EXIT_INTERRUPTED, EXIT_SIGTERM, RoomFailed


class Stopped(BaseException):
    """Raised when a signal asked the run to end. Not an Exception, so that no error handling of a room catches it."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("stopped by a signal")
        self.exit_code = exit_code


class StoppedWithoutCheckpoint(Stopped):
    """Raised when a signal ended the run and no checkpoint was possible: a room failed, or the grace time was over."""

    def __init__(self, exit_code: int, failure: RoomFailed | None = None) -> None:
        super().__init__(exit_code)
        self.failure = failure

    def __str__(self) -> str:
        reason = self.failure or "none was possible within checkpoint.grace_s"
        return f"stopped by a signal, without a checkpoint: {reason}"


EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_SIGTERM}
SAME_S = 3.0
"""The same signal within this time after the first does not count as a second one. A scheduler, or `kill` of a process
group, also signals a launcher like `uv run`, which passes the signal on. More than twice `waits.TICK_S`: Python handles
a signal only when the main thread is back from Ray, so the second of two may be late by as much."""
BOTH_S = 0.5
"""A different signal within this time does not count as a second one either: launchers turn Ctrl-C, which the terminal
sends to all processes, into a SIGTERM."""


def _end_at_the_next(first: int) -> None:
    """Makes the next signal end the process immediately, unless it comes soon after the signal `first`: such a signal
    belongs to the same request and is ignored. Soon means: within SAME_S seconds if it is the same signal, within
    BOTH_S seconds if it is the other one."""
    arrived = time.monotonic()

    def end(signum: int, _frame: FrameType | None) -> None:
        if time.monotonic() - arrived > (SAME_S if signum == first else BOTH_S):
            os._exit(EXIT_CODES[signal.Signals(signum)])  # the cluster's processes end with the driver

    for number in EXIT_CODES:
        signal.signal(number, end)


_received: list[int] = []
"""Empty, or the exit code of the signal for which Stopped was raised."""


def _say(text: str) -> None:
    """Prints a line from a signal handler: writes to stderr directly, because the signal may have interrupted another
    print."""
    with suppress(OSError):  # nobody reads any more
        os.write(2, f"{text}; a second signal ends this at once\n".encode())


def _stop(signum: int, _frame: FrameType | None) -> None:
    _say("stopping: waiting for the end of what was started")
    _end_at_the_next(signum)
    _received.append(EXIT_CODES[signal.Signals(signum)])
    raise Stopped(_received[0])


def check() -> None:
    """Raises Stopped if a signal came. Call it regularly: the signal handler raises Stopped too, but Ray's compiled
    code may swallow that exception."""
    if _received:
        raise Stopped(_received[0])


@contextmanager
def as_stopped() -> Iterator[None]:
    """Context manager: if a signal came, turns any error in the `with` block into Stopped. This is needed because Ray's
    compiled code raises another error if a Stopped interrupts it, and other libraries turn a Stopped into their own
    errors."""
    try:
        yield
    except Exception as error:
        if _received:
            raise Stopped(_received[0]) from error
        raise


def arm() -> None:
    """Makes SIGTERM and Ctrl-C raise Stopped in the main thread; a second signal (see SAME_S) ends the process
    immediately. Call it again after `ray.init`, which sets its own handlers."""
    for number in EXIT_CODES:
        signal.signal(number, _stop)


class Stop:
    """A context manager around training: during its `with` block SIGTERM and Ctrl-C are only noted, so that training
    stops where the run can be saved (`check`).

    Raises StoppedWithoutCheckpoint in the main thread if the `with` block has not ended `grace_s` seconds after the
    signal. A second signal (see SAME_S) ends the process immediately. A room that fails after a signal is not built
    again: its RoomFailed becomes StoppedWithoutCheckpoint.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.exit_code: int | None = None

    def requested(self) -> bool:
        """Returns True once a signal came."""
        return self.exit_code is not None

    def check(self) -> None:
        """Raises Stopped if a signal came. Call it where the run can be saved."""
        if self.exit_code is not None:
            raise Stopped(self.exit_code)

    def __enter__(self) -> Stop:
        signal.signal(signal.SIGALRM, self._overdue)
        for number in EXIT_CODES:
            signal.signal(number, self._note)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.exit_code is None:  # else a second signal still ends the process
            arm()
        elif isinstance(error, RoomFailed):  # the signal may have reached the rooms too, if it was sent to a group
            raise StoppedWithoutCheckpoint(self.exit_code, error) from error

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.exit_code = EXIT_CODES[signal.Signals(signum)]
        _say(
            f"stopping: waiting up to {self._grace_s:g} s (checkpoint.grace_s) for the step in hand and its checkpoint"
        )
        _end_at_the_next(signum)
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _overdue(self, _signum: int, _frame: FrameType | None) -> None:
        assert self.exit_code is not None
        raise StoppedWithoutCheckpoint(self.exit_code)


def end_after(close: Callable[[], Awaitable[object]]) -> None:
    """Makes SIGTERM end this process, an actor, only after `close()` has finished. `close` must limit its own time.
    Call this function in the actor's event loop. Ray's own SIGTERM handler runs last, because that handler ends the
    process at once, even in the middle of work in the event loop.

    The signal is caught by faulthandler, which writes to a pipe and so wakes the event loop. A handler in Python is not
    possible: it needs the main thread, which Ray occupies. faulthandler's handler runs in whichever thread gets the
    signal.
    """
    loop = asyncio.get_running_loop()
    (reading, writing) = os.pipe()
    endings: list[asyncio.Task[None]] = []

    async def end() -> None:
        try:
            await close()
        finally:
            faulthandler.unregister(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    def on_signal() -> None:
        loop.remove_reader(reading)
        endings.append(loop.create_task(end()))

    loop.add_reader(reading, on_signal)
    faulthandler.register(signal.SIGTERM, writing, all_threads=False)
