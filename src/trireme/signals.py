"""SIGTERM and Ctrl-C end a run in order: rooms are stopped and nothing is left behind."""

from __future__ import annotations

import os
import signal
from types import FrameType

from trireme.errors import EXIT_INTERRUPTED, EXIT_SIGTERM


class Stopped(BaseException):
    """A signal asked the run to end. Not an Exception: no room's error handling may swallow it."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_SIGTERM}


def _stop(signum: int, _frame: FrameType | None) -> None:
    for each in EXIT_CODES:  # a second signal ends at once; the cluster's processes share the driver's fate
        signal.signal(each, lambda again, _: os._exit(EXIT_CODES[signal.Signals(again)]))
    raise Stopped(EXIT_CODES[signal.Signals(signum)])


def arm() -> None:
    """Makes both signals raise Stopped in the main thread. To be called again after `ray.init`, which sets its own."""
    for each in EXIT_CODES:
        signal.signal(each, _stop)
