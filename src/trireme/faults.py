"""Named fault points, so that tests hit a place for certain and not by timing.

`TRIREME_FAULTS="trainer.forward_backward@3=raise,inference.received=corrupt"` arms points by name: `@n` means the n-th
time that a process passes it (default 1). Actions that happen here: `raise`, `kill` (SIGKILL to itself), and `freeze`:
the file `TRIREME_FAULT_REACHED` is made and the thread sleeps, so that a test can kill the whole tree of processes at
this very point. Any other word is returned to the caller, which knows what it means. With the variable unset a point
costs one dictionary look-up.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

_passed: Counter[str] = Counter()


class InjectedFault(RuntimeError):
    """Raised by a fault point that was armed with `raise`."""


def _armed(spec: str) -> dict[str, tuple[int, str]]:
    armed = {}
    for item in filter(None, spec.split(",")):
        point, _, action = item.partition("=")
        name, _, count = point.partition("@")
        armed[name] = (int(count or 1), action)
    return armed


def fault_point(name: str) -> str | None:
    """Passes the point `name`; returns the action that a test armed for this passage, None otherwise."""
    spec = os.environ.get("TRIREME_FAULTS")
    if not spec or name not in (armed := _armed(spec)):
        return None
    _passed[name] += 1
    count, action = armed[name]
    if _passed[name] != count:
        return None
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "freeze":
        Path(os.environ["TRIREME_FAULT_REACHED"]).touch()
        while True:
            time.sleep(3600)
    if action == "raise":
        raise InjectedFault(f"fault injected at {name}, passage {count}")
    return action
