"""Asks processes for heartbeats, waits for the answers of many processes together, and finds dead and silent ones."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from trireme.core.actors import Ref
from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import Heartbeat
from trireme.process import waits
from trireme.process.environ import STACKS, STACKS_S
from trireme.process.ray_cluster import signal_processes
from trireme.supervision.roster import PartHealth, Roster, RunPart

EVERY_S = 1.0
"""Time between an answer and the next request."""
AGAIN_S = 0.2
"""Time between a request that did not arrive and the next one."""
SUSPECT = 1 / 3
"""Part of the time limit after which a silent process is suspect."""
LONGEST_GAP = 1 / 4
"""Part of `heartbeat_s`: the most that the time between two calls of `look` counts as. In a longer time this process,
or its machine, may have been stopped itself, and must not take all others for silent."""

Value = TypeVar("Value")
Lost = Callable[[str, TriremeError, bool], None]


@dataclass
class _Monitored:
    """A process, and how long it has been silent. Times are seconds of the monitor's clock (`_awake`)."""

    ask: Callable[[], Ref[Heartbeat]]
    since: float | None = None  # when the first request without an answer was sent; None: it has answered all
    pending: bool = False  # a request is on its way
    unreached: bool = False  # the last request could not reach it
    next: float = 0.0  # when to send the next request
    condemned: bool = False  # it was judged, and is about to be killed


@dataclass(frozen=True)
class Silent:
    """A process that was silent for too long, and the error that it is reported with."""

    name: str
    part: RunPart | None  # where it runs, if that is known
    failure: RoomFailed
    process: _Monitored


class HeartbeatMonitor:
    """Asks processes for heartbeats, and waits for other answers from them. Not thread-safe.

    Calls `lost(name, failure, died)` once for each lost process; `died` is False if the process itself reported that it
    failed. A process is lost after `heartbeat_s` seconds of silence. An engine of vLLM answers only between two of its
    forward passes, so the replica's actor watches it: the actor's heartbeat says how long the engine has been silent,
    and fails when that is too long.
    """

    def __init__(self, roster: Roster, heartbeat_s: float, lost: Lost) -> None:
        self._roster = roster
        self._heartbeat_s = heartbeat_s
        self._lost = lost
        self._awaited: dict[Ref[object], tuple[str, Callable[[Any], None]]] = {}
        self._monitored: dict[str, _Monitored] = {}
        self._condemned: list[Silent] = []
        self._last = self._awake_s = 0.0

    @property
    def names(self) -> list[str]:
        """Names of the monitored processes."""
        return list(self._monitored)

    def add(self, name: str, ask: Callable[[], Ref[Heartbeat]]) -> None:
        """Begins to monitor the process `name`. `ask` requests a Heartbeat, and returns Ray's reference to it."""
        self._monitored[name] = _Monitored(ask)

    def drop(self, name: str) -> None:
        """Stops monitoring the process `name`, and ignores all answers from it that are awaited."""
        self._monitored.pop(name, None)
        for ref in [ref for ref, (owner, _) in self._awaited.items() if owner == name]:
            del self._awaited[ref]

    def wait_for(self, ref: Ref[Value], name: str, handle: Callable[[Value | TriremeError], None]) -> None:
        """Records that `ref`, an answer of the process `name`, is awaited. When the answer has come, `arrived` calls
        `handle` with its value, or with the TriremeError that the call failed with."""
        self._awaited[ref] = (name, handle)

    def is_unreached(self, name: str) -> bool:
        """Returns True if the last request did not reach the process `name`, and Ray does not know yet whether it
        lives."""
        return name in self._monitored and self._monitored[name].unreached

    def refs(self) -> dict[Ref[object], str]:
        """Returns {awaited reference: name of the process that answers}."""
        return {ref: name for ref, (name, _) in self._awaited.items()}

    def arrived(self, ref: Ref[object], outcome: object) -> None:
        """Passes `outcome`, the value or the error of the awaited `ref`, to its handler; ignores it if the process was
        dropped."""
        _, handle = self._awaited.pop(ref, (None, None))
        if handle:
            handle(outcome)

    def look(self) -> list[Silent]:
        """Sends the heartbeat requests that are due, and marks silent processes as suspect in the roster. Returns the
        processes that have been silent for too long. Each process is returned only once: the caller must `kill` it,
        then call `end`."""
        now = self._awake()
        for name, process in self._monitored.items():
            if not process.pending and process.next <= now:
                process.pending = True
                if process.since is None:
                    process.since = now
                self.wait_for(process.ask(), name, partial(self._beat, name))
        waiting = {name: now - process.since for name, process in self._monitored.items() if process.since is not None}
        silent = {name: seconds for name, seconds in waiting.items() if seconds >= SUSPECT * self._heartbeat_s}
        for name, silent_s in silent.items():
            reason = f"has answered nothing for {silent_s:.0f} s (timeouts.heartbeat_s = {self._heartbeat_s:g})"
            self._judge(name, reason, silent_s >= self._heartbeat_s)
        condemned = self._condemned
        self._condemned = []
        return condemned

    def _awake(self) -> float:
        """Returns the monitor's clock in seconds. It leaves out times in which this process itself was stopped."""
        now = time.monotonic()
        self._awake_s += min(now - self._last, LONGEST_GAP * self._heartbeat_s)
        self._last = now
        return self._awake_s

    def _beat(self, name: str, outcome: Heartbeat | TriremeError) -> None:
        process = self._monitored[name]
        if isinstance(outcome, TriremeError):
            if waits.unreached(outcome):
                process.pending, process.unreached, process.next = False, True, self._awake() + AGAIN_S
            else:
                self._end(name, outcome, waits.died(outcome))
            return
        self._monitored[name] = _Monitored(process.ask, next=self._awake() + EVERY_S)
        is_late = outcome.behind_s >= SUSPECT * outcome.limit_s
        self._roster.answered(name, outcome.pids, outcome.node, in_time=not is_late)
        if is_late:
            limit = f"(the limit is {outcome.limit_s:.0f} s, learned from this run or timeouts.update_s)"
            reason = f"it has had no sign of life of its engine, which has work, for {outcome.behind_s:.0f} s {limit}"
            self._roster.set(name, PartHealth.SUSPECT, reason)

    def _judge(self, name: str, reason: str, is_dead: bool) -> None:
        if not is_dead:
            self._roster.set(name, PartHealth.SUSPECT, f"it {reason}")
        elif not (process := self._monitored[name]).condemned:
            process.condemned = True
            failure = RoomFailed(f"{name} {reason}: it is killed; its log says where it was")
            self._condemned.append(Silent(name, self._roster.part(name), failure, process))

    def end(self, silent: Sequence[Silent]) -> None:
        """Records that the processes `silent` were killed, and calls `lost` for each. Skips processes that were dropped
        meanwhile."""
        for process in silent:
            if self._monitored.get(process.name) is process.process:
                self._end(process.name, process.failure, True)

    def _end(self, name: str, failure: TriremeError, died: bool) -> None:
        self.drop(name)
        self._roster.set(name, PartHealth.DEAD, str(failure))
        self._roster.note(name, str(failure))
        self._lost(name, failure, died)


def kill(silent: Sequence[Silent]) -> None:
    """Makes silent processes write the stacks of their threads to their logs, and kills them. If nodes do not answer,
    this takes some seconds, independent of the number of nodes."""
    parts = [process.part for process in silent if process.part]
    send(parts, STACKS)
    time.sleep(STACKS_S)
    send(parts, signal.SIGKILL)


def send(parts: Sequence[RunPart], number: int) -> None:
    """Sends the signal `number` to all known processes of `parts`, on all nodes at the same time."""
    pids: dict[str, list[int]] = {}
    for part in parts:
        if part.pids:
            pids.setdefault(part.node, []).extend(part.pids)
    signal_processes(pids, number)
