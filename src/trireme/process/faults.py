"""Named fault points, so that tests hit a place for certain and not by timing.

`TRIREME_FAULTS="trainer.forward_backward[1]@3=kill,inference.received=corrupt"` arms points by name. `[n]`: only in the
process that has this number in its room (`number_process`), and in those that it started; without it, in all. `@n`: the
n-th time that a process passes the point (default 1); `@n+`: and each time after it.

Actions that happen here: `raise`; `kill` (SIGKILL to itself); `stop` (SIGSTOP to itself: it goes on after SIGCONT); and
`freeze`: the file `TRIREME_FAULT_REACHED` is made (where that is a directory, one in it, called as the item is), and
the thread sleeps until somebody removes it, so that a test can kill whatever it likes at this very point. Any other
word is returned to the caller, which knows what it means.

With `TRIREME_FAULT_ONCE`, a directory that all processes share, each item of the list acts in one of them, so that the
successor of a killed process passes the point. With `TRIREME_FAULTS` unset a point costs one dictionary look-up.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

POLL_S = 0.01
_NUMBER = "TRIREME_FAULT_NUMBER"
_ITEM = re.compile(r"(?P<name>[\w.]+)(\[(?P<number>\d+)\])?(@(?P<passage>\d+)(?P<on>\+)?)?=(?P<action>\w+)")
_passed: Counter[str] = Counter()
_claimed: set[str] = set()


class InjectedFault(RuntimeError):
    """Raised by a fault point that was armed with `raise`."""


@dataclass(frozen=True)
class Armed:
    """One item of the list, and what it says. `number`: None for any process."""

    item: str
    name: str
    number: str | None
    passage: int
    on: bool
    action: str

    @classmethod
    def parse(cls, item: str) -> Armed:
        if not (found := _ITEM.fullmatch(item)):
            raise ValueError(f"TRIREME_FAULTS: {item!r} is not `name=action`, `name@passage=action` or with [number]")
        return cls(item, found["name"], found["number"], int(found["passage"] or 1), bool(found["on"]), found["action"])

    @property
    def meant(self) -> bool:
        """Whether it is about this process."""
        return self.number in (None, os.environ.get(_NUMBER))

    def is_due(self, passage: int) -> bool:
        return passage == self.passage or (self.on and passage > self.passage)

    def claim(self) -> bool:
        """Whether it is for this process to act: no other has."""
        once = os.environ.get("TRIREME_FAULT_ONCE")
        if not once or self.item in _claimed:
            return True
        try:
            os.close(os.open(Path(once) / self.item, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        _claimed.add(self.item)
        return True

    def act(self) -> str:
        if self.action == "raise":
            raise InjectedFault(f"fault injected at {self.name}, passage {self.passage}")
        if self.action in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)
        if self.action == "freeze":
            reached = Path(os.environ["TRIREME_FAULT_REACHED"])
            if reached.is_dir():
                reached /= self.item
            reached.touch()
            while reached.exists():
                time.sleep(POLL_S)
        return self.action


@cache
def _armed(spec: str) -> tuple[Armed, ...]:
    return tuple(Armed.parse(item) for item in spec.split(",") if item)


def number_process(number: int) -> None:
    """This process, and those that it will start, is the one with this number in its room."""
    os.environ[_NUMBER] = str(number)


def fault_point(name: str) -> str | None:
    """Passes the point `name`; returns the action that a test armed for this passage, None otherwise."""
    spec = os.environ.get("TRIREME_FAULTS")
    if not spec:
        return None
    armed = [each for each in _armed(spec) if each.name == name and each.meant]
    _passed[name] += bool(armed)
    for each in armed:
        if each.is_due(_passed[name]) and each.claim():
            return each.act()
    return None
