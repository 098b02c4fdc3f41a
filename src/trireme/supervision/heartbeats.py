"""Waits for the answers of many processes at once, and finds those that are dead or silent."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import Heartbeat
from trireme.process import waits
from trireme.process.ray_cluster import signal_processes
from trireme.supervision.roster import PartHealth, Roster, RunPart

EVERY_S = 1.0
"""Between an answer and the next question."""
AGAIN_S = 0.2
"""Between a question that did not arrive and the next one."""
SUSPECT = 1 / 3
"""Of the heartbeat: silent for so long, a process is suspect."""
LONGEST_GAP = 1 / 4
"""Of the heartbeat: so much counts, at most, of the time between two calls. Whoever calls may have been stopped itself,
or its machine, and would take all others for silent."""
STACKS_S = 0.5
"""What a process is given to write its stacks before it is killed."""
STACKS = signal.SIGUSR1
"""`trireme.process.logs` makes a process write the stacks of all its threads to its log when this comes."""
RECEIVER = "orchestrator_0"
"""Who the replicas stream to. While it is stopped they answer nothing either: an actor waits, inside Ray, until what it
streams was received. So they are not judged as long as it is silent, and get their time again once it is gone."""

Handle = Callable[[Any], None]
Lost = Callable[[str, TriremeError, bool], None]


@dataclass
class Silence:
    """Of one process: since when it has not answered (None: it has), whether a question is on its way to it or the last
    one could not reach it, and when it is asked next."""

    since: float | None = None
    asked: bool = False
    unreached: bool = False
    next: float = 0.0


class Silences:
    """All times are seconds on one clock that does not go back. Silence is long from a part of `heartbeat_s` on."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._silence: dict[str, Silence] = {}
        self._last = self._awake_s = 0.0

    def _awake(self, now: float) -> float:
        """Seconds in which the caller was awake until `now`: the clock of this class."""
        self._awake_s += min(now - self._last, LONGEST_GAP * self._heartbeat_s)
        self._last = now
        return self._awake_s

    def watch(self, name: str) -> None:
        """From now on `name` is asked; a successor of the same name is not blamed for its predecessor's silence."""
        self._silence[name] = Silence()

    def forget(self, name: str) -> None:
        self._silence.pop(name, None)

    def due(self, now: float) -> list[str]:
        """Who is to be asked; the caller does so at once."""
        awake = self._awake(now)
        due = [name for name, of in self._silence.items() if not of.asked and of.next <= awake]
        for name in due:
            of = self._silence[name]
            of.asked, of.since = True, awake if of.since is None else of.since
        return due

    def answered(self, name: str, now: float) -> None:
        if name in self._silence:
            self._silence[name] = Silence(next=self._awake(now) + EVERY_S)

    def unreached(self, name: str, now: float) -> None:
        """The question did not come to `name`: it is asked again, and is silent since the first time."""
        if of := self._silence.get(name):
            of.asked, of.unreached, of.next = False, True, self._awake(now) + AGAIN_S

    def is_unreached(self, name: str) -> bool:
        """Whether no question has reached `name` since the last that could not."""
        return name in self._silence and self._silence[name].unreached

    def silent(self, now: float) -> dict[str, float]:
        """Seconds of silence of each whose silence is long."""
        awake = self._awake(now)
        silent = {name: awake - of.since for name, of in self._silence.items() if of.since is not None}
        return {name: seconds for name, seconds in silent.items() if seconds >= SUSPECT * self._heartbeat_s}


class HeartbeatMonitor:
    """`lost(name, failure, died)` is called once for each process that is lost; `died`: it ended or was silent, as
    opposed to saying itself that it is of no more use. A process is silent for at most `heartbeat_s`, an engine, which
    answers only between two steps, for at most `engine_s`. Not for several threads at once."""

    def __init__(self, roster: Roster, heartbeat_s: float, engine_s: float, lost: Lost) -> None:
        self._roster, self._heartbeat_s, self._engine_s, self._lost = roster, heartbeat_s, engine_s, lost
        self._silences = Silences(heartbeat_s)
        self._awaited: dict[Any, tuple[str, Handle]] = {}
        self._ask: dict[str, Callable[[], Any]] = {}

    @property
    def names(self) -> list[str]:
        """The processes that are watched."""
        return list(self._ask)

    def add(self, name: str, ask: Callable[[], Any]) -> None:
        """Watches `name`, which `ask` asks for a Heartbeat; it gives a reference to the answer."""
        self._ask[name] = ask
        self._silences.watch(name)

    def drop(self, name: str) -> None:
        """Watches `name` no more; nothing that it still answers is handled."""
        self._ask.pop(name, None)
        self._silences.forget(name)
        for ref in [ref for ref, (of, _) in self._awaited.items() if of == name]:
            del self._awaited[ref]

    def wait_for(self, ref: Any, name: str, handle: Handle) -> None:
        """When `ref` is there, `handle` gets its value, or the TriremeError that it failed with."""
        self._awaited[ref] = (name, handle)

    def is_unreached(self, name: str) -> bool:
        """Whether Ray does not know at the moment if `name` lives."""
        return self._silences.is_unreached(name)

    def refs(self) -> dict[Any, str]:
        """What is waited for, with the names of the owners."""
        return {ref: name for ref, (name, _) in self._awaited.items()}

    def arrived(self, ref: Any, outcome: Any) -> None:
        known = self._awaited.pop(ref, None)
        if known:  # else it was dropped meanwhile
            known[1](outcome)

    def look(self) -> None:
        """Asks whoever is due, and judges the silent."""
        now = time.monotonic()
        for name in self._silences.due(now):
            self.wait_for(self._ask[name](), name, partial(self._beat, name))
        silent = self._silences.silent(now)
        for name, silent_s in silent.items():
            why = f"has answered nothing for {silent_s:.0f} s (timeouts.heartbeat_s = {self._heartbeat_s:g})"
            judged = name == RECEIVER or RECEIVER not in silent
            self._judge(name, why, judged and silent_s >= self._heartbeat_s)

    def _beat(self, name: str, outcome: Heartbeat | TriremeError) -> None:
        if isinstance(outcome, TriremeError) and waits.unreached(outcome):
            self._silences.unreached(name, time.monotonic())
            return
        if isinstance(outcome, TriremeError):
            self._end(name, outcome, waits.died(outcome))
            return
        self._silences.answered(name, time.monotonic())
        is_late = outcome.behind_s >= SUSPECT * self._engine_s
        self._roster.answered(name, outcome.pids, outcome.node, in_time=not is_late)
        if is_late:
            limit = f"(timeouts.update_s = {self._engine_s:g})"
            why = f"has had no answer of its engine, which has work, for {outcome.behind_s:.0f} s {limit}"
            self._judge(name, why, outcome.behind_s >= self._engine_s)

    def _judge(self, name: str, why: str, is_dead: bool) -> None:
        if not is_dead:
            self._roster.set(name, PartHealth.SUSPECT, f"it {why}")
            return
        if part := self._roster.part(name):
            self.write_stacks([part])
            time.sleep(STACKS_S)
            send(part, part.pids, signal.SIGKILL)
        self._end(name, RoomFailed(f"{name} {why}: it is killed; its log says where it was"), True)

    def _end(self, name: str, failure: TriremeError, died: bool) -> None:
        self.drop(name)
        if name == RECEIVER:
            for other in self._ask:
                self._silences.watch(other)
        self._roster.set(name, PartHealth.DEAD, str(failure))
        self._roster.note(name, str(failure))
        self._lost(name, failure, died)

    def write_stacks(self, parts: Sequence[RunPart]) -> None:
        """Makes the actors of `parts`, and their engines, write where their threads are to their logs."""
        for part in parts:
            if part.name in self._ask:
                send(part, part.pids, STACKS)


def send(part: RunPart, pids: Sequence[int], number: int) -> None:
    """Sends a signal to processes of `part`; none where its node is gone."""
    if pids:
        with suppress(TriremeError):
            signal_processes(part.node, pids, number)
