"""Waits for the answers of many processes at once, and finds those that are dead or silent."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import Pulse
from trireme.process import waits
from trireme.process.ray_cluster import signal_processes
from trireme.supervision.pulses import SUSPECT, Pulses
from trireme.supervision.roster import Health, Part, Roster

STACKS_S = 0.5
"""What a process is given to write its stacks before it is killed."""
STACKS = signal.SIGUSR1
"""`trireme.process.logs` makes a process write the stacks of all its threads to its log when this comes."""
RECEIVER = "orchestrator_0"
"""Who the replicas stream to. While it is stopped they answer nothing either: an actor waits, inside Ray, until what it
streams was received. So they are not judged as long as it is silent, and get their time again once it is gone."""

Handle = Callable[[Any], None]
Lost = Callable[[str, TriremeError, bool], None]


class Watch:
    """`lost(name, failure, died)` is called once for each process that is lost; `died`: it ended or was silent, as
    opposed to saying itself that it is of no more use. A process is silent for at most `heartbeat_s`, an engine, which
    answers only between two steps, for at most `engine_s`. Not for several threads at once."""

    def __init__(self, roster: Roster, heartbeat_s: float, engine_s: float, lost: Lost) -> None:
        self._roster, self._heartbeat_s, self._engine_s, self._lost = roster, heartbeat_s, engine_s, lost
        self._pulses = Pulses(heartbeat_s)
        self._awaited: dict[Any, tuple[str, Handle]] = {}
        self._ask: dict[str, Callable[[], Any]] = {}

    @property
    def names(self) -> list[str]:
        """The processes that are watched."""
        return list(self._ask)

    def add(self, name: str, ask: Callable[[], Any]) -> None:
        """Watches `name`, which `ask` asks for a Pulse; it gives a reference to the answer."""
        self._ask[name] = ask
        self._pulses.watch(name)

    def drop(self, name: str) -> None:
        """Watches `name` no more; nothing that it still answers is handled."""
        self._ask.pop(name, None)
        self._pulses.forget(name)
        for ref in [ref for ref, (of, _) in self._awaited.items() if of == name]:
            del self._awaited[ref]

    def wait_for(self, ref: Any, name: str, handle: Handle) -> None:
        """When `ref` is there, `handle` gets its value, or the TriremeError that it failed with."""
        self._awaited[ref] = (name, handle)

    def is_unreached(self, name: str) -> bool:
        """Whether Ray does not know at the moment if `name` lives."""
        return self._pulses.is_unreached(name)

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
        for name in self._pulses.due(now):
            self.wait_for(self._ask[name](), name, partial(self._pulsed, name))
        silent = self._pulses.silent(now)
        for name, silent_s in silent.items():
            why = f"has answered nothing for {silent_s:.0f} s (timeouts.heartbeat_s = {self._heartbeat_s:g})"
            judged = name == RECEIVER or RECEIVER not in silent
            self._judge(name, why, judged and silent_s >= self._heartbeat_s)

    def _pulsed(self, name: str, outcome: Pulse | TriremeError) -> None:
        if isinstance(outcome, TriremeError) and waits.unreached(outcome):
            self._pulses.unreached(name, time.monotonic())
            return
        if isinstance(outcome, TriremeError):
            self._end(name, outcome, waits.died(outcome))
            return
        self._pulses.answered(name, time.monotonic())
        self._roster.found(name, outcome.pids, outcome.node)
        if outcome.behind_s >= SUSPECT * self._engine_s:
            limit = f"(timeouts.update_s = {self._engine_s:g})"
            why = f"has had no answer of its engine, which has work, for {outcome.behind_s:.0f} s {limit}"
            self._judge(name, why, outcome.behind_s >= self._engine_s)
        else:
            self._roster.no_suspect(name)

    def _judge(self, name: str, why: str, is_dead: bool) -> None:
        if not is_dead:
            self._roster.set(name, Health.SUSPECT, f"it {why}")
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
                self._pulses.watch(other)
        self._roster.set(name, Health.DEAD, str(failure))
        self._roster.note(name, str(failure))
        self._lost(name, failure, died)

    def write_stacks(self, parts: Sequence[Part]) -> None:
        """Makes the actors of `parts`, and their engines, write where their threads are to their logs."""
        for part in parts:
            if part.name in self._ask:
                send(part, part.pids, STACKS)


def send(part: Part, pids: Sequence[int], number: int) -> None:
    """Sends a signal to processes of `part`; none where its node is gone."""
    if pids:
        with suppress(TriremeError):
            signal_processes(part.node, pids, number)
