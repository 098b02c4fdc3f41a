"""The replicas of a run while it goes on: which serve, which are on their way, and how many there shall be.

STARTING --its start ends--> READY --join--> JOINING --it has the newest weights--> SERVING --drain--> DRAINING
    ^                          ^                |                                      |                   |
    |                          +----------------+------- the attempt ends -------------+                   v
    +---- lost at any time: a successor, as long as the budget lasts                                  taken away
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

from trireme.config import Config
from trireme.core.errors import BadInput, RoomFailed, TriremeError
from trireme.plan.base import count
from trireme.process import waits
from trireme.process.ray_cluster import has_place
from trireme.supervision.heartbeats import HeartbeatMonitor
from trireme.supervision.roster import PartHealth, Roster

SECOND_OPINION_S = 3.0
"""The orchestrator found a replica failed: for so long the end of trainer or orchestrator may turn out to be why."""
SPARES_EVERY_S = 10.0
PREFIX = "inference_"

Again = Callable[[str, TriremeError, bool], None]


class Serving(Protocol):
    """The orchestrator, as it is told of replicas. All calls give references to the answers."""

    def join(self, index: int, client: Any, *, reserved: bool) -> Any: ...

    def leave(self, index: int, reason: str) -> Any: ...

    def drain(self, index: int, timeout_s: float) -> Any: ...

    def next_failure(self) -> Any:
        """The answer is (index, reason)."""
        ...


class Replicas(Protocol):
    """The inference room: actors by number. `ready_ref` and `replace` give a reference to the end of a start."""

    @property
    def indices(self) -> Sequence[int]: ...

    def ready_ref(self, index: int) -> Any: ...

    def heartbeat_ref(self, index: int) -> Any: ...

    def replace(self, index: int) -> Any: ...

    def add(self, options: dict[str, Any]) -> int: ...

    def remove(self, index: int) -> dict[str, Any]: ...

    def keep_spares(self) -> None: ...

    def client(self, index: int) -> Any: ...

    def options(self, index: int) -> Mapping[str, Any]: ...

    def is_reserved(self, index: int) -> bool: ...

    def abort_all(self) -> None: ...


class Places(Protocol):
    """Where replicas that are added can be, as Ray's options of the actor."""

    def take(self) -> dict[str, Any]: ...

    def give_back(self, options: dict[str, Any]) -> None: ...


class State(Enum):
    """Of a replica, see above."""

    STARTING = auto()
    READY = auto()
    JOINING = auto()
    SERVING = auto()
    DRAINING = auto()


SHOWN = {
    State.STARTING: PartHealth.STARTING,
    State.READY: PartHealth.CATCHING_UP,
    State.JOINING: PartHealth.CATCHING_UP,
    State.SERVING: PartHealth.HEALTHY,
    State.DRAINING: PartHealth.DRAINING,
}


def index_of(name: str) -> int | None:
    """Number of the replica with this name in the roster; None for a part that is none."""
    return int(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None


class ReplicaManager:
    """`again(name, failure, died)` is asked before a successor is started, and raises when there must be none. Replicas
    that are added take their places from `places`; all that leave give theirs back. Not for several threads at once."""

    def __init__(
        self,
        config: Config,
        replicas: Replicas,
        roster: Roster,
        watch: HeartbeatMonitor,
        again: Again,
        places: Places,
    ) -> None:
        self._config, self._replicas, self._roster, self._watch = config, replicas, roster, watch
        self._again, self._places = again, places
        self._states: dict[int, State] = {}
        self._since: dict[int, float] = {}  # when each was started or lost last
        self._successors: set[int] = set()  # those of them that have not served yet
        self._serving: Serving | None = None
        self._reports: list[tuple[float, int, str]] = []  # from when on to believe which failure
        self._spares_at = math.inf  # when to look after spares next, once replicas have joined

    def begin(self) -> None:
        """All replicas have been asked to start."""
        for index in self._replicas.indices:
            self._starts(index, self._replicas.ready_ref(index))

    def attach(self, serving: Serving) -> None:
        """From now on `serving` is told of every replica that is ready."""
        self._serving, self._reports = serving, []
        self._await_report()
        for index in self._of(State.READY):
            self._join(index)

    def detach(self) -> None:
        """The attempt ends. What it asked of the replicas is forgotten."""
        if self._serving is None:
            return
        self._serving = None
        for index in self._of(State.JOINING, State.SERVING):
            self._become(index, State.READY)
        for index in self._of(State.DRAINING):
            self._take_away(index)
        self._replicas.abort_all()

    def missing(self, all_of_them: bool) -> list[str]:
        """Who is still waited for: none if all serve, or (`all_of_them` false) one that samples for training."""
        if not all_of_them and any(not self._replicas.is_reserved(index) for index in self._of(State.SERVING)):
            return []
        return [f"inference replica {index}" for index in self._of(State.STARTING, State.READY, State.JOINING)]

    def look(self) -> None:
        """Believes what was reported long enough ago, of replicas of which Ray knows if they live, and ends starts that
        take too long."""
        now = time.monotonic()
        due = [
            report for report in self._reports if report[0] <= now and not self._watch.is_unreached(name_of(report[1]))
        ]
        self._reports = [report for report in self._reports if report not in due]
        for _, index, reason in due:
            if self._states.get(index) is State.SERVING:
                self._fail(index, reason)
        for index in self._of(State.STARTING):
            self._look_at_start(index, now)
        if now >= self._spares_at:
            self._keep_spares()

    def serves(self, index: int) -> bool:
        """Whether this attempt has sampled with replica `index`: not if it was lost in the one before, which ended."""
        return self._states.get(index) is State.SERVING

    def lost(self, index: int, failure: TriremeError, died: bool) -> None:
        """Replica `index` is of no more use. Raises what its loss ends the run with."""
        if self._serving:
            self._tell(self._serving.leave(index, str(failure)))
        if self._states[index] is State.DRAINING:
            self._take_away(index)
            return
        if isinstance(failure, BadInput):
            raise failure
        self._again(f"inference replica {index}", failure, died)
        self._starts(index, self._replicas.replace(index), successor=True)

    def scale(self, wanted: int) -> tuple[bool, str]:
        """From now on there shall be so many replicas, the reserved ones among them: whether that can be, and what
        happens now."""
        staying = [index for index in self._states if self._states[index] is not State.DRAINING]
        for _ in range(wanted - len(staying)):
            index = self._replicas.add(self._places.take())
            self._starts(index, self._replicas.ready_ref(index))
        leaving = [index for index in reversed(staying) if not self._replicas.is_reserved(index)]
        for index in leaving[: max(len(staying) - wanted, 0)]:
            self._leave(index)
        change = wanted - len(staying)
        if not change:
            return True, f"there are {wanted} already"
        what = f"{change} more to start" if change > 0 else f"{-change} to leave, once they have done what they sample"
        return True, f"{count(len(staying), 'replica')}; {what}"

    # ---------------------------------------------------------------------------------------------- one replica's way

    def _starts(self, index: int, ready: Any, successor: bool = False) -> None:
        self._since[index] = time.monotonic()
        self._states[index] = State.STARTING
        if successor:
            self._successors.add(index)
        self._roster.set(name_of(index), PartHealth.STARTING, pids=(), successor=successor)
        self._watch.wait_for(ready, name_of(index), partial(self._started, index))

    def _started(self, index: int, outcome: Any) -> None:
        if isinstance(outcome, TriremeError):
            self._fail(index, str(outcome), outcome)
            return
        self._watch.add(name_of(index), partial(self._replicas.heartbeat_ref, index))
        self._become(index, State.READY)
        if self._serving:
            self._join(index)

    def _join(self, index: int) -> None:
        assert self._serving
        self._become(index, State.JOINING)
        joined = self._serving.join(index, self._replicas.client(index), reserved=self._replicas.is_reserved(index))
        self._watch.wait_for(joined, name_of(index), partial(self._joined, index))

    def _joined(self, index: int, outcome: Any) -> None:
        if self._states[index] is not State.JOINING:
            return
        if isinstance(outcome, TriremeError):
            self._reports.append((time.monotonic() + SECOND_OPINION_S, index, f"could not join: {outcome}"))
            self._become(index, State.SERVING)
            return
        self._become(index, State.SERVING)
        if index in self._successors:  # not when it joins the next attempt
            self._successors.remove(index)
            took = time.monotonic() - self._since[index]
            self._roster.note(name_of(index), f"its successor serves, {took:.1f} s after it was started")
        self._keep_spares()

    def _keep_spares(self) -> None:
        self._spares_at = time.monotonic() + SPARES_EVERY_S
        if self._serving and not self.missing(all_of_them=True):  # else whoever starts has the cores
            self._replicas.keep_spares()

    def _leave(self, index: int) -> None:
        if self._serving is None or self._states[index] is not State.SERVING:
            self._take_away(index)
            return
        self._become(index, State.DRAINING)
        drained = self._serving.drain(index, self._config.timeouts.update_s)
        self._watch.wait_for(drained, name_of(index), lambda _outcome: self._take_away(index))

    def _take_away(self, index: int) -> None:
        self._watch.drop(name_of(index))
        self._places.give_back(self._replicas.remove(index))
        del self._states[index]
        self._roster.remove(name_of(index))
        self._keep_spares()

    def _become(self, index: int, state: State) -> None:
        self._states[index] = state
        self._roster.set(name_of(index), SHOWN[state])

    # -------------------------------------------------------------------------------------------------------- failures

    def _look_at_start(self, index: int, now: float) -> None:
        limit = self._config.timeouts.start_s
        if not has_place(self._replicas.options(index)):
            self._since[index] = now
            self._roster.set(name_of(index), PartHealth.STARTING, "it waits for a place in the cluster")
        elif now - self._since[index] > limit:
            self._fail(index, f"it did not start within {limit:g} s (timeouts.start_s)")

    def _fail(self, index: int, reason: str, failure: TriremeError | None = None) -> None:
        name = f"inference replica {index}"
        failure = failure or RoomFailed(reason if reason.startswith(name) else f"{name}: {reason}")
        self._watch.drop(name_of(index))
        self._roster.set(name_of(index), PartHealth.DEAD, str(failure))
        self._roster.note(name_of(index), str(failure))
        self.lost(index, failure, waits.died(failure))

    def _await_report(self) -> None:
        assert self._serving
        self._watch.wait_for(self._serving.next_failure(), REPORTS, partial(self._reported, self._serving))

    def _reported(self, serving: Serving, outcome: Any) -> None:
        if serving is not self._serving or isinstance(outcome, TriremeError):
            return  # the attempt is over, or ends: its own watch says why
        index, reason = outcome
        self._reports.append((time.monotonic() + SECOND_OPINION_S, index, reason))
        self._await_report()

    def _tell(self, told: Any) -> None:
        self._watch.wait_for(told, REPORTS, lambda _outcome: None)

    def _of(self, *states: State) -> list[int]:
        return [index for index, state in sorted(self._states.items()) if state in states]


REPORTS = "orchestrator_0 (of replicas)"


def name_of(index: int) -> str:
    """Of a replica, in the roster."""
    return f"{PREFIX}{index}"
