"""Who goes first on a core that is asked for more than it has."""

from __future__ import annotations

import os

NICE = 10
"""Of those who ask for a core it gets a tenth of what the others do."""


def be_nice() -> None:
    """From now on this thread, and those that it starts, have little of a core that others ask for too, for good. For a
    thread of its own that nobody waits for yet, and that comes to an end however busy the machine is."""
    os.nice(NICE)  # of this thread alone: in Linux a thread has its own


def yield_to_others() -> None:
    """From now on this thread runs in the time that others leave, for good. For a thread of its own that does work
    nobody waits for, and hardly ever holds Python's lock: while it waits for a core with it, nobody else runs Python.

    SCHED_IDLE, not a high nice value: whoever wakes up takes the core at once, instead of when this one's turn ends.
    (Training waits shortly and often: for another shard, for a message.)
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: of this thread, as everything of the scheduler
