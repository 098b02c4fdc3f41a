"""Named fault points, so that tests hit a place reliably and not by timing.

`TRIREME_FAULTS="trainer.forward_backward[1]@3=kill,inference.received=corrupt"` arms points by name. `[n]`: only in the
process with this number in its room (`number_process`) and its children; without it, in all processes. `@n`: the n-th
time that a process passes the point (default 1); `@n+`: that time and each later one.

Actions here: `raise`; `full` (the OSError of a full disk); `kill` (the process sends SIGKILL to itself); `stop`
(SIGSTOP to itself, until SIGCONT); and `freeze`, which makes the file `TRIREME_FAULT_REACHED` (if that is a directory,
a file in it named like the item) and sleeps until a test has removed it, so that the test can kill processes at exactly
this point. Any other word, such as `corrupt`, is returned to the caller, which acts on it.

With `TRIREME_FAULT_ONCE`, a directory that all processes share, each item acts in one process only, so that the
successor of a killed process passes the point. With `TRIREME_FAULTS` unset a point costs one dictionary look-up.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections import Counter
from contextlib import suppress
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
class ArmedFault:
    """One item of the variable TRIREME_FAULTS."""

    item: str  # its text
    name: str  # of the fault point
    number: str | None  # of the process; None: any
    passage: int  # acts at this passage of the point
    on: bool  # and at each later one
    action: str

    @classmethod
    @cache
    def parse(cls, item: str) -> ArmedFault:
        match = _ITEM.fullmatch(item)
        if not match:
            raise ValueError(f"TRIREME_FAULTS: {item!r} is not `name=action`, `name@passage=action` or with [number]")
        return cls(item, match["name"], match["number"], int(match["passage"] or 1), bool(match["on"]), match["action"])

    def claim(self) -> bool:
        """Returns True if this process is to carry out the fault. If TRIREME_FAULT_ONCE is set, only the first process
        that claims an item of TRIREME_FAULTS may carry it out."""
        once = os.environ.get("TRIREME_FAULT_ONCE")
        if not once or self.item in _claimed:
            return True
        with suppress(FileExistsError):
            (Path(once) / self.item).touch(exist_ok=False)
            _claimed.add(self.item)
        return self.item in _claimed

    def act(self) -> str:
        if self.action == "raise":
            raise InjectedFault(f"fault injected at {self.name}, passage {self.passage}")
        if self.action == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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


def number_process(number: int) -> None:
    """Gives this process and its future children a number: the process's number in its room. An item of TRIREME_FAULTS
    with `[n]` acts only in processes with the number n."""
    os.environ[_NUMBER] = str(number)


def fault_point(name: str) -> str | None:
    """Marks a place in the code, called `name`, at which tests can inject faults. If TRIREME_FAULTS has a fault for
    this place that is due at this call (a process counts its calls for the place), carries out the fault's action and
    returns the action's name. The action may raise, or kill the process. Otherwise returns None."""
    spec = os.environ.get("TRIREME_FAULTS")
    if not spec:
        return None
    faults = map(ArmedFault.parse, filter(None, spec.split(",")))
    numbers = (None, os.environ.get(_NUMBER))
    armed = [fault for fault in faults if fault.name == name and fault.number in numbers]
    _passed[name] += bool(armed)
    for fault in armed:
        is_due = _passed[name] == fault.passage or (fault.on and _passed[name] > fault.passage)
        if is_due and fault.claim():
            return fault.act()
    return None
