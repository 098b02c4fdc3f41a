"""The health of every part of a run, and the history of what happened to them. No Ray, no clock of its own.

    starting -> catching up -> healthy <-> suspect -> dead -> starting (its successor)
                                   |
                                   +-> draining -> gone (not in the roster any more)

A part is a process with a room's name and number, as its log has it: `trainer_0`, `inference_1`, `orchestrator_0`,
`driver_0`. Whoever watches calls `set`; whoever shows reads `parts` and `incidents`, or listens.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

KEPT = 200
"""Incidents that are kept in memory; the file has all."""
LONGEST = 500
"""Characters of a line that says why: the end of a long traceback is in the log."""


class Health(StrEnum):
    """Of a part. `suspect`: it has not answered for some time; `catching up`: it takes the newest weights before it
    serves; `draining`: it gets no new work and leaves."""

    STARTING = "starting"
    CATCHING_UP = "catching up"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True)
class Part:
    """One part of a run. `since`: seconds since 1970 at which `health` began; `why`: one line, empty while healthy.
    `pids`: of its processes, the actor's first; empty while they are not known. `restarts`: how many successors it had
    in this run of the command."""

    name: str
    health: Health
    since: float
    why: str = ""
    pids: tuple[int, ...] = ()
    node: str = ""
    restarts: int = 0


@dataclass(frozen=True)
class Incident:
    """Something that happened to a part, or to the run. `at`: seconds since 1970. `what`: one line for people. `step`:
    how many were done."""

    at: float
    part: str
    what: str
    step: int
    attempt: int


Listener = Callable[["Roster", Incident | None], None]


class Roster:
    """All parts and incidents of one command. May be used by several threads. `now` gives seconds since 1970.

    A listener is called after each change, in the thread that made it: with an incident if there was one.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._parts: dict[str, Part] = {}
        self._incidents: deque[Incident] = deque(maxlen=KEPT)
        self._unsuspected: dict[str, Health] = {}
        self._listeners: list[Listener] = []
        self.step = 0
        self.attempt = 1
        self.incidents_total = 0

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` after each change, until what this returns is called."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @property
    def parts(self) -> list[Part]:
        """In the order in which they came."""
        with self._lock:
            return list(self._parts.values())

    @property
    def incidents(self) -> list[Incident]:
        """The newest, oldest first."""
        with self._lock:
            return list(self._incidents)

    def part(self, name: str) -> Part | None:
        with self._lock:
            return self._parts.get(name)

    def set(
        self,
        name: str,
        health: Health,
        why: str = "",
        *,
        pids: tuple[int, ...] | None = None,
        node: str | None = None,
        successor: bool = False,
    ) -> None:
        """Part `name` is `health` from now on; does nothing when it is already, for the same reason. `successor`: it is
        a new process in the place of one that is gone. None leaves `pids` and `node` as they are."""
        with self._lock:
            before = self._parts.get(name) or Part(name, health, self._now())
            if health is Health.SUSPECT and before.health is not Health.SUSPECT:
                self._unsuspected[name] = before.health
            changed = Part(
                name,
                health,
                before.since if before.health == health else self._now(),
                _line(why),
                before.pids if pids is None else pids,
                before.node if node is None else node,
                before.restarts + successor,
            )
            if changed == self._parts.get(name):
                return
            self._parts[name] = changed
        self._tell(None)

    def found(self, name: str, pids: tuple[int, ...], node: str) -> None:
        """Part `name` is these processes, on this node."""
        part = self.part(name)
        if part:
            self.set(name, part.health, part.why, pids=pids, node=node)

    def no_suspect(self, name: str) -> None:
        """Part `name` has answered: if it was suspect, it is what it was before."""
        with self._lock:
            before = self._unsuspected.pop(name, None)
        part = self.part(name)
        if before and part and part.health is Health.SUSPECT:
            self.set(name, before)

    def remove(self, name: str) -> None:
        """Part `name` has left."""
        with self._lock:
            self._parts.pop(name, None)
        self._tell(None)

    def note(self, part: str, what: str) -> None:
        """Something happened that a person should know of."""
        incident = Incident(self._now(), part, _line(what), self.step, self.attempt)
        with self._lock:
            self._incidents.append(incident)
            self.incidents_total += 1
        self._tell(incident)

    def note_return(self, part: str, took_s: float) -> None:
        """Part `part` was built again, and the attempt begins."""
        self.note(part, f"built again in {took_s:.1f} s: attempt {self.attempt} goes on from step {self.step}")

    def at_step(self, step: int) -> None:
        """The run has completed `step` steps."""
        self.step = step
        self._tell(None)

    def _tell(self, incident: Incident | None) -> None:
        for listener in list(self._listeners):
            listener(self, incident)


def _line(text: str) -> str:
    line = "".join(filter(str.isprintable, " ".join(text.split())))
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
