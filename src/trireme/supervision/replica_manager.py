"""The replicas of a run: which serve, which are starting, and how many are wanted.

STARTING --its start ends--> READY --join--> JOINING --it has the newest weights--> SERVING --drain--> DRAINING
    ^                          ^                |                                      |                   |
    |                          +----------------+------- the attempt ends -------------+                   v
    +---- lost at any time: a successor, as long as the restart budget lasts                            removed

Then it is left out, and another is started in its place after cluster.restart_window_s, as long as cluster.min_replicas
that sample for training are left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

from trireme.config import Config
from trireme.config.run import START_LIMIT
from trireme.core.errors import BadInput, RoomFailed, TriremeError
from trireme.plan.base import count
from trireme.process import waits
from trireme.process.ray_cluster import PlacePool
from trireme.supervision.heartbeats import HeartbeatMonitor, Lost
from trireme.supervision.roster import PartHealth, Roster

SECOND_OPINION_S = 3.0
"""Time between the replica set's report that a replica failed and its replacement. In it, a failure of trainer or
orchestrator may turn out to be the cause."""
PREFIX = "inference_"
REPORTS = "replica_set_0 (of replicas)"
ALIVE_S = 3.0
"""Time for the actor of a lost replica to say that it lost nothing but its engine; on a busy machine an answer may take
a second."""
PLACES_S = 1.0
"""Time between two looks at the places of replicas that start, which ask Ray's head."""


class ReplicaActors(Protocol):
    """The inference room: actors by number. `ready_ref` and `replace` return a reference to the end of a start."""

    @property
    def indices(self) -> Sequence[int]: ...

    def ready_ref(self, index: int) -> Any: ...

    def heartbeat_ref(self, index: int) -> Any: ...

    def lost_engine_ref(self, index: int) -> Any | None: ...

    def replace(self, index: int, *, same_actor: bool) -> Any: ...

    def add(self, options: dict[str, Any]) -> int: ...

    def remove(self, index: int) -> dict[str, Any]: ...

    def client(self, index: int) -> Any: ...

    def options(self, index: int) -> Mapping[str, Any]: ...

    def abort_all(self) -> None: ...


@dataclass(frozen=True)
class ReplicaLimits:
    """Says how often replicas are started again."""

    again: Lost
    """Called with a replica's name before a successor is started; raises if there must be none."""
    again_on: Callable[[str, TriremeError], None]
    """The same, called with the Ray id of the node where the replica was."""


class ReplicaState(Enum):
    """The state of a replica (see the module)."""

    STARTING = auto()
    READY = auto()
    JOINING = auto()
    SERVING = auto()
    DRAINING = auto()


SHOWN = {
    ReplicaState.READY: PartHealth.CATCHING_UP,
    ReplicaState.JOINING: PartHealth.CATCHING_UP,
    ReplicaState.SERVING: PartHealth.HEALTHY,
    ReplicaState.DRAINING: PartHealth.DRAINING,
}


@dataclass
class _Life:
    """One replica, from the start of its process on."""

    state: ReplicaState
    since: float
    """When it was started, or last found without a place."""
    successor: bool
    """It replaces another and has not served yet."""
    placeless: bool = False
    """It waits for a place in the cluster."""
    deciding_until: float = math.inf
    """Until when its actor, which is lost, may answer what it has lost."""
    join: Any = None
    """Its newest join; answers to joins of earlier attempts are ignored."""


def _part_name(index: int) -> str:
    return f"{PREFIX}{index}"


class ReplicaManager:
    """Starts, replaces, adds and removes the replicas of a run. Not thread-safe.

    Added replicas take their places from `places`, and all that leave give theirs back.
    """

    def __init__(
        self,
        config: Config,
        replicas: ReplicaActors,
        roster: Roster,
        monitor: HeartbeatMonitor,
        limits: ReplicaLimits,
        places: PlacePool,
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._roster = roster
        self._monitor = monitor
        self._limits = limits
        self._places = places
        self._left_out: list[tuple[float, dict[str, Any]]] = []  # when to try again, and Ray's options
        self._lives: dict[int, _Life] = {}
        self._places_next = 0.0  # when to look at places again
        self._replica_set: Any = None
        self._reports: list[tuple[float, int, str]] = []  # (time from which to believe it, replica, reason)

    def begin(self) -> None:
        """Waits for the starts of all replicas, which have been requested."""
        for index in self._replicas.indices:
            self._starts(index, self._replicas.ready_ref(index))

    @staticmethod
    def index_of(name: str) -> int | None:
        """Returns the number of the replica with this name in the roster; None for other parts."""
        if name.startswith(PREFIX):
            return int(name.removeprefix(PREFIX))
        return None

    def attach(self, replica_set: Any) -> None:
        """Passes each ready replica to the actor `replica_set` from now on."""
        self._replica_set = replica_set
        self._reports = []
        self._await_report(replica_set)
        for index in self._of(ReplicaState.READY):
            self._join(index, replica_set)

    def detach(self) -> None:
        """Ends an attempt: aborts what it asked of the replicas."""
        if self._replica_set is None:
            return
        self._replica_set = None
        for index in self._of(ReplicaState.JOINING, ReplicaState.SERVING):
            self._become(index, ReplicaState.READY)
        for index in self._of(ReplicaState.DRAINING):
            self._take_away(index)
        self._replicas.abort_all()

    def missing(self, all_of_them: bool) -> list[str]:
        """Returns the replicas that do not serve yet; none if one serves and `all_of_them` is False."""
        if not all_of_them and self._of(ReplicaState.SERVING):
            return []
        waited_for = self._of(ReplicaState.STARTING, ReplicaState.READY, ReplicaState.JOINING)
        return [f"inference replica {index}" for index in waited_for]

    def placeless(self) -> list[str]:
        """Returns the replicas that wait for a place in the cluster."""
        starting = self._of(ReplicaState.STARTING)
        return [f"inference replica {index}" for index in starting if self._lives[index].placeless]

    def look(self) -> None:
        """Replaces replicas that were reported as failed long enough ago, unless Ray does not know yet if they live,
        and ends starts that take too long."""
        now = time.monotonic()
        reports = self._reports
        self._reports = []
        for at, index, reason in reports:
            if at > now or self._monitor.is_unreached(_part_name(index)):
                self._reports.append((at, index, reason))
            elif self.serves(index):
                self._fail(index, reason)
        for index in [index for index, life in self._lives.items() if life.deciding_until <= now]:
            self._monitor.drop(_part_name(index))
            self._succeed(index)
        self._look_at_starts(now)
        for again in [each for each in self._left_out if each[0] <= now]:
            self._left_out.remove(again)
            index = self._add(again[1])
            self._roster.note(_part_name(index), "starts in the place of a replica that was left out")

    def serves(self, index: int) -> bool:
        """Returns True if this attempt samples with replica `index`."""
        return index in self._lives and self._lives[index].state is ReplicaState.SERVING

    def lost(self, index: int, failure: TriremeError, died: bool) -> None:
        """Replaces the lost replica `index`, or leaves it out. Raises the error with which its loss ends the run."""
        if self._replica_set:
            self._monitor.wait_for(self._replica_set.leave.remote(index, str(failure)), REPORTS, lambda _outcome: None)
        life = self._lives[index]
        if life.state is ReplicaState.DRAINING:
            self._take_away(index)
            return
        if isinstance(failure, BadInput):
            raise failure
        part = self._roster.part(_part_name(index))
        try:
            self._limits.again(f"inference replica {index}", failure, died)
            if part and part.node:
                self._limits.again_on(part.node, failure)
        except TriremeError as refusal:
            if not self._can_spare():
                raise
            self._leave_out(index, refusal)
            return
        if died:
            lost_engine = None
        else:
            lost_engine = self._replicas.lost_engine_ref(index)
        if lost_engine is None:
            self._succeed(index)
            return
        now = time.monotonic()
        self._lives[index] = replace(life, state=ReplicaState.STARTING, since=now, deciding_until=now + ALIVE_S)
        self._monitor.wait_for(lost_engine, _part_name(index), partial(self._succeed, index))

    @property
    def running(self) -> int:
        """Number of replicas that have memory, with leaving ones."""
        return len(self._lives)

    def added(self, wanted: int) -> int:
        """Returns how many replicas start to reach `wanted`, not counting leaving ones."""
        return max(0, wanted - len(self._lives) + len(self._of(ReplicaState.DRAINING)))

    def scale(self, wanted: int) -> str:
        """Changes the number of replicas to `wanted`; free places serve others. Returns a description of the
        changes."""
        staying = [index for index, life in self._lives.items() if life.state is not ReplicaState.DRAINING]
        while self._left_out:
            self._places.give_back(self._left_out.pop()[1])
        for _ in range(wanted - len(staying)):
            self._add(self._places.take())
        for index in staying[wanted:][::-1]:
            self._leave(index)
        change = wanted - len(staying)
        if not change:
            return f"there are {wanted} already"
        if change > 0:
            what = f"{change} more to start"
        else:
            what = f"{-change} to leave, once they have done what they sample"
        return f"{count(len(staying), 'replica')}; {what}"

    # ---------------------------------------------------------------------------------------------- one replica's way

    def _add(self, options: dict[str, Any]) -> int:
        index = self._replicas.add(options)
        self._starts(index, self._replicas.ready_ref(index))
        return index

    def _succeed(self, index: int, lost_engine: Any = False) -> None:
        """Starts the successor of a replica: in the same actor, if that `lost_engine` and nothing else."""
        self._starts(index, self._replicas.replace(index, same_actor=lost_engine is True), successor=True)

    def _starts(self, index: int, ready: Any, successor: bool = False) -> None:
        self._lives[index] = _Life(ReplicaState.STARTING, time.monotonic(), successor)
        self._places_next = 0.0
        self._roster.set(_part_name(index), PartHealth.STARTING, pids=(), successor=successor)
        self._monitor.wait_for(ready, _part_name(index), partial(self._started, index))

    def _started(self, index: int, outcome: Any) -> None:
        if isinstance(outcome, TriremeError):
            self._fail(index, str(outcome), outcome)
            return
        self._monitor.add(_part_name(index), partial(self._replicas.heartbeat_ref, index))
        self._become(index, ReplicaState.READY)
        if self._replica_set:
            self._join(index, self._replica_set)

    def _join(self, index: int, replica_set: Any) -> None:
        self._become(index, ReplicaState.JOINING)
        joined = replica_set.join.remote(index, self._replicas.client(index))
        self._lives[index].join = joined
        self._monitor.wait_for(joined, _part_name(index), partial(self._joined, index, joined))

    def _joined(self, index: int, join: Any, outcome: Any) -> None:
        life = self._lives[index]
        if life.state is not ReplicaState.JOINING or life.join is not join:
            return
        self._become(index, ReplicaState.SERVING)
        if isinstance(outcome, TriremeError):
            self._reports.append((time.monotonic() + SECOND_OPINION_S, index, f"could not join: {outcome}"))
            return
        if life.successor:
            life.successor = False  # it joins the next attempt as any other
            took = time.monotonic() - life.since
            self._roster.note(_part_name(index), f"its successor serves, {took:.1f} s after it was started")

    def _leave(self, index: int) -> None:
        if self._replica_set is None or not self.serves(index):
            self._take_away(index)
            return
        self._become(index, ReplicaState.DRAINING)
        drained = self._replica_set.drain.remote(index, self._config.timeouts.update_s)
        self._monitor.wait_for(drained, _part_name(index), lambda _outcome: self._take_away(index))

    def _take_away(self, index: int) -> None:
        self._places.give_back(self._remove(index))

    def _remove(self, index: int) -> dict[str, Any]:
        self._monitor.drop(_part_name(index))
        options = self._replicas.remove(index)
        del self._lives[index]
        self._roster.remove(_part_name(index))
        return options

    def _become(self, index: int, state: ReplicaState) -> None:
        self._lives[index].state = state
        self._roster.set(_part_name(index), SHOWN[state])

    # -------------------------------------------------------------------------------------------------------- failures

    def _look_at_starts(self, now: float) -> None:
        """Ends starts that take too long. The time in which a replica has no place in the cluster does not count."""
        starting = [i for i in self._of(ReplicaState.STARTING) if self._lives[i].deciding_until == math.inf]
        if starting and now >= self._places_next:
            self._places_next = now + PLACES_S
            there = self._places.are_there([self._replicas.options(index) for index in starting])
            for index, is_there in zip(starting, there, strict=True):
                self._lives[index].placeless = not is_there
        limit = self._config.timeouts.start_s
        for index in starting:
            life = self._lives[index]
            if life.placeless:
                life.since = now
                self._roster.set(_part_name(index), PartHealth.STARTING, "it waits for a place in the cluster")
            elif now - life.since > limit:
                self._fail(index, f"it did not start within {limit:g} s ({START_LIMIT})")

    def _can_spare(self) -> bool:
        """Returns True if there are more than `cluster.min_replicas` replicas, so that one can be lost."""
        cluster = self._config.cluster
        if self._config.deterministic or not cluster.max_restarts:
            return False
        return len(self._lives) > cluster.min_replicas

    def _leave_out(self, index: int, refusal: TriremeError) -> None:
        retry_s = self._config.cluster.restart_window_s
        part = self._roster.part(_part_name(index))
        where = f" (node {part.node})" if part and part.node else ""
        self._left_out.append((time.monotonic() + retry_s, self._remove(index)))
        goes_on = f"the run goes on with {count(len(self._lives), 'replica')}, and tries another in {retry_s:g} s"
        self._roster.note(_part_name(index), f"is left out{where}; {goes_on}: {refusal}")

    def _fail(self, index: int, reason: str, failure: TriremeError | None = None) -> None:
        name = f"inference replica {index}"
        failure = failure or RoomFailed(reason if reason.startswith(name) else f"{name}: {reason}")
        self._monitor.drop(_part_name(index))
        self._roster.set(_part_name(index), PartHealth.DEAD, str(failure))
        self._roster.note(_part_name(index), str(failure))
        self.lost(index, failure, waits.died(failure))

    def _await_report(self, replica_set: Any) -> None:
        self._monitor.wait_for(replica_set.next_failure.remote(), REPORTS, partial(self._reported, replica_set))

    def _reported(self, replica_set: Any, outcome: Any) -> None:
        if replica_set is not self._replica_set or isinstance(outcome, TriremeError):
            return  # the attempt has ended, or the monitor will say why it does
        index, reason = outcome
        self._reports.append((time.monotonic() + SECOND_OPINION_S, index, reason))
        self._await_report(replica_set)

    def _of(self, *states: ReplicaState) -> list[int]:
        return [index for index, life in sorted(self._lives.items()) if life.state in states]
