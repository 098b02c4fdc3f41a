"""The health of each part of a run, and the history of the parts. Pure: uses no Ray, and no clock but the given one.

    starting -> catching up -> healthy <-> suspect -> dead -> starting (its successor)
                                   |
                                   +-> draining -> gone (removed from the roster)

A part is a process. Its name is a room and a number, as in its log's name: `trainer_0`, `inference_1`, `driver_0`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

RETAINED = 200
"""Number of incidents that are kept in memory; the file has all."""
LONGEST = 500
"""Number of characters of the text that an incident or a part's health gives as its reason; the rest of a long
traceback is in the log."""


WAITS_FOR_WAKING = "it starts when the replicas wake"
"""The reason of a part that will start, but must not take any memory yet."""


class PartHealth(StrEnum):
    """The health of one part."""

    STARTING = "starting"
    CATCHING_UP = "catching up"  # it takes the newest weights before it serves
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # it has not answered for some time
    DRAINING = "draining"  # it gets no new work and leaves
    DEAD = "dead"


@dataclass(frozen=True)
class RunPart:
    """One part of a run (a process), with its health."""

    name: str  # room and number
    health: PartHealth
    since: float  # when `health` began, in seconds since 1970
    why: str = ""  # the reason in one line; empty while healthy and awake
    pids: tuple[int, ...] = ()  # its processes, the actor's first; empty while unknown
    node: str = ""  # Ray's id of its node
    restarts: int = 0  # number of its successors in this run of the command

    @property
    def room(self) -> str:
        """The room of the part: `inference` for `inference_1`."""
        return self.name.rpartition("_")[0]

    @property
    def serves(self) -> bool:
        """True for a replica that samples."""
        return self.room == "inference" and self.health == PartHealth.HEALTHY


@dataclass(frozen=True)
class Incident:
    """Something that happened to a part or to the run."""

    at: float  # seconds since 1970
    part: str  # the part's name
    what: str  # one line for people
    step: int  # training steps completed by then
    attempt: int


Listener = Callable[["Roster", Incident | None], None]


class Roster:
    """Holds all parts of one command, and its newest incidents. Thread-safe. `now()` returns seconds since 1970.

    Listeners are called after each change, in the thread that made the change. They get the roster, and the new
    incident or None.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._parts: dict[str, RunPart] = {}
        self._incidents: deque[Incident] = deque(maxlen=RETAINED)
        self._unsuspected: dict[str, PartHealth] = {}  # the health of each suspect before it became one
        self._listeners: list[Listener] = []
        self.step = 0
        self.attempt = 1
        self.start_s = 0.0
        self.incidents_total = 0

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` after each change. Returns a function that ends the calls."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @property
    def parts(self) -> list[RunPart]:
        """All parts in the order in which they were added."""
        with self._lock:
            return list(self._parts.values())

    @property
    def incidents(self) -> list[Incident]:
        """The newest incidents, oldest first."""
        with self._lock:
            return list(self._incidents)

    def part(self, name: str) -> RunPart | None:
        with self._lock:
            return self._parts.get(name)

    def metrics(self) -> dict[str, float]:
        """Returns the roster's columns in the row of a step: number of incidents, and of replicas that sample."""
        serving = sum(part.serves for part in self.parts)
        return {"perf/incidents": float(self.incidents_total), "perf/replicas": float(serving)}

    def set(
        self,
        name: str,
        health: PartHealth,
        reason: str = "",
        *,
        pids: tuple[int, ...] | None = None,
        node: str | None = None,
        successor: bool = False,
    ) -> None:
        """Sets the health of part `name` and the `reason` for it. Adds the part if it is new. Does nothing if nothing
        changes. `pids`, `node`: the part's processes and node; None leaves them unchanged. `successor`: the part is a
        new process that replaces a lost one."""
        with self._lock:
            before = self._parts.get(name) or RunPart(name, health, self._now())
            if health is PartHealth.SUSPECT and before.health is not PartHealth.SUSPECT:
                self._unsuspected[name] = before.health
            if before.health == health:
                since = before.since
            else:
                since = self._now()
            place = (before.pids if pids is None else pids, before.node if node is None else node)
            changed = RunPart(name, health, since, _line(reason), *place, before.restarts + successor)
            if changed == self._parts.get(name):
                return
            self._parts[name] = changed
        self._tell(None)

    def answered(self, name: str, pids: tuple[int, ...], node: str, *, in_time: bool = True) -> None:
        """Records the processes and the node that part `name` reported in a heartbeat. If the part is suspect and the
        answer was `in_time`, restores the health that the part had before."""
        part = self.part(name)
        if part is None:
            return
        self.set(name, part.health, part.why, pids=pids, node=node)
        if in_time and part.health is PartHealth.SUSPECT and (before := self._unsuspected.pop(name, None)):
            self.set(name, before)

    def remove(self, name: str) -> None:
        """Removes part `name` from the roster, because it has left the run."""
        with self._lock:
            self._parts.pop(name, None)
        self._tell(None)

    def note(self, part: str, text: str) -> None:
        """Records an incident of `part`: `text`, the present time, step and attempt."""
        incident = Incident(self._now(), part, _line(text), self.step, self.attempt)
        with self._lock:
            self._incidents.append(incident)
            self.incidents_total += 1
        self._tell(incident)

    def note_return(self, part: str, took_s: float, *retained: str) -> None:
        """Records an incident: `part` is ready again after `took_s` seconds and an attempt begins. `retained`: texts on
        unfinished work that the attempt continues."""
        begins = f"ready again after {took_s:.1f} s: attempt {self.attempt} continues from step {self.step}"
        self.note(part, "; ".join([begins, *retained]))

    def at_step(self, step: int) -> None:
        """Records that the run has completed `step` steps."""
        self.step = step
        self._tell(None)

    def _tell(self, incident: Incident | None) -> None:
        for listener in list(self._listeners):
            listener(self, incident)


def _line(text: str) -> str:
    line = "".join(filter(str.isprintable, " ".join(text.split())))
    if len(line) <= LONGEST:
        return line
    return f"{line[:LONGEST]} ..."
