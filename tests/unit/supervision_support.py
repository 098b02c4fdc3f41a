"""A driver of a run, as far as those see it who look at the run directory from outside."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trireme.rundir import LOCK
from trireme.supervision.roster import Health, Roster
from trireme.supervision.status import ScaleRequest, ScaleRequests

DEADLINE_S = 60.0


@contextmanager
def driven(root: Path) -> Iterator[None]:
    """This process holds the lock file of the run in `root`."""
    lock = root / LOCK
    lock.write_text(f"pid {os.getpid()} on {os.uname().nodename}\n")
    with lock.open():
        yield


@contextmanager
def answering(root: Path, on_request: Callable[[ScaleRequests, ScaleRequest], None]) -> Iterator[None]:
    """A thread that looks for requests, as a driver does, and lets `on_request` answer them."""
    requests, ending = ScaleRequests(root), threading.Event()

    def poll() -> None:
        while not ending.wait(0.02):
            if request := requests.poll():
                on_request(requests, request)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(DEADLINE_S)


def roster_of(*healths: Health) -> Roster:
    """Replicas of that health, in order."""
    roster = Roster(lambda: 1_800_000_000.0)
    for index, health in enumerate(healths):
        roster.set(f"inference_{index}", health, pids=(100 + index, 200 + index), node="here")
    return roster
