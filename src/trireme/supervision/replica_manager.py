"""Manages the replicas of a run: which serve, which are starting, and how many are wanted.

STARTING --its start ends, join--> CATCHING_UP <--tables say who serves--> HEALTHY --drain--> DRAINING --> removed
    ^
    +---- lost at any time: a successor, as long as the restart budget lasts

After the budget is used up, a lost replica is left out, if at least cluster.min_replicas others are left. Another one
is started in its place after cluster.restart_window_s.

Replicas join the replica set, an actor that keeps a table of them: the table says which replicas serve
(`inference.replica_set`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from trireme.config import Config
from trireme.config.run import START_LIMIT
from trireme.core.actors import ActorOptions, ActorProxy, Ref, remote_method
from trireme.core.errors import BadInput, RoomFailed, TriremeError
from trireme.core.sampler import Heartbeat
from trireme.plan.whole import count
from trireme.process import waits
from trireme.process.ray_cluster import PlacePool
from trireme.supervision.heartbeats import HeartbeatMonitor, Lost
from trireme.supervision.roster import WAITS_FOR_WAKING, PartHealth, Roster

SECOND_OPINION_S = 3.0
"""Time between a table that says why a replica is gone and the replica's replacement. In this time, a failure of
trainer or orchestrator may turn out to be the cause."""
PREFIX = "inference_"
TABLES = "replica_set_0 (its table)"
TABLE_S = 20.0
"""Longest wait of one request for a newer table of the replica set."""
ALIVE_S = 3.0
"""Time for the actor of a lost replica to answer whether it lost only its engine; on a busy machine an answer may take
a second."""
ASLEEP = "sleeps until the next update"
ASLEEP_S = 0.5
"""Time after which the start of a successor is tried again, if it waits because the replicas sleep."""
PLACES_S = 1.0
"""Time between two checks whether starting replicas have their places in the cluster; a check sends requests to Ray's
head."""


Number = tuple[int, int]
"""The generation of a replica, which names one life of the replica for ever; or the number of a table, which orders the
tables."""


class ReplicaTable(Protocol):
    """A table of the replica set: which replicas serve, which have left, and whether all sleep."""

    @property
    def number(self) -> Number: ...

    @property
    def asleep(self) -> bool: ...

    def serves(self, index: int, generation: Number, /) -> bool | None: ...

    def reason(self, index: int, generation: Number, /) -> TriremeError | None: ...


class Membership(Protocol):
    """The calls to the replica set's actor that change which replicas it has (`inference.replica_set.actor`)."""

    @remote_method
    def join(self, index: int, client: Any, generation: Number | None = None) -> None: ...

    @remote_method
    def leave(self, index: int, reason: str) -> None: ...

    @remote_method
    async def drain(self, index: int, timeout_s: float) -> None: ...


class ReplicaSetRoom(Protocol):
    """The interface of the handle of an attempt's replica set (`inference.replica_set.handle`). The replica set is an
    actor. It decides which replicas serve, and publishes its decisions as tables."""

    incarnation: int

    @property
    def actor(self) -> ActorProxy[Membership]: ...

    def table(self, after: Number, wait_s: float, /) -> Ref[ReplicaTable]: ...

    def begin_again(self, clients: Mapping[int, Any], generations: Mapping[int, Number], /) -> Ref[None]: ...

    def heartbeats(self) -> Mapping[str, Callable[[], Ref[Heartbeat]]]: ...


class ReplicaActors(Protocol):
    """The inference room: starts and ends the actors of replicas. Each replica has a number (`index`). `ready_ref` and
    `replace` return a reference that is ready when the replica has started."""

    @property
    def indices(self) -> Sequence[int]: ...

    def name(self, index: int, /) -> str: ...

    def ready_ref(self, index: int, /) -> Ref[object]: ...

    def heartbeat_ref(self, index: int, /) -> Ref[Heartbeat]: ...

    def lost_engine_ref(self, index: int, /) -> Ref[bool] | None: ...

    def replace(self, index: int, *, same_actor: bool) -> Ref[object]: ...

    def add(self, options: ActorOptions, /) -> int: ...

    def remove(self, index: int, /) -> ActorOptions: ...

    def client(self, index: int) -> Any: ...

    def options(self, index: int, /) -> ActorOptions: ...

    def abort_all(self) -> None: ...


@dataclass
class _Life:
    """One life of a replica: from a start (the first one, or the start of a successor) until its loss."""

    generation: Number
    """Names this life in tables of the replica set."""
    state: PartHealth
    since: float
    """When the process was started, or when it last had no place in the cluster; seconds of the monotonic clock."""
    successor: bool
    """True: the process replaces a lost replica, and has not served yet."""
    placeless: bool = False
    """True: the process waits for a place in the cluster."""
    deciding_until: float = math.inf
    """After the replica's loss: until when its actor may answer whether it lost only its engine, or when the start of
    the successor is tried again because the replicas slept. Infinite at all other times."""
    lost_engine: bool = False
    """True: the replica's actor lives, and has lost only its engine."""
    gone_since: float = math.inf
    """When a table first reported the replica as gone; infinite if none has."""


def _part_name(index: int) -> str:
    return f"{PREFIX}{index}"


class ReplicaManager:
    """Starts, replaces, adds and removes the replicas of a run. Not thread-safe.

    `places` is a pool of places in the cluster. An added replica takes its place from the pool. When a replica leaves,
    its place goes back to the pool. `again` is called before a successor is started, with the lost replica's name, the
    failure, and True if the process died; it raises an error if there must be no successor.
    """

    def __init__(
        self,
        config: Config,
        replicas: ReplicaActors,
        roster: Roster,
        monitor: HeartbeatMonitor,
        again: Lost,
        places: PlacePool,
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._roster = roster
        self._monitor = monitor
        self._again = again
        self._places = places
        self._left_out: list[tuple[float, ActorOptions]] = []  # when to try again, and Ray's options
        self._lives: dict[int, _Life] = {}
        self._places_next = 0.0  # when to look at places again
        self._replica_set: ReplicaSetRoom | None = None
        self._table: ReplicaTable | None = None  # its newest
        self._numbers = itertools.count()

    def begin(self) -> None:
        """Begins to wait for all replicas to start; the inference room has already requested the starts. Returns at
        once."""
        for index in self._replicas.indices:
            self._starts(index, self._replicas.ready_ref(index))

    @staticmethod
    def index_of(name: str) -> int | None:
        """Returns the number of the replica with this name in the roster; None for other parts."""
        if name.startswith(PREFIX):
            return int(name.removeprefix(PREFIX))
        return None

    def attach(self, replica_set: ReplicaSetRoom) -> None:
        """Begins an attempt: makes each replica join `replica_set`, the handle of the attempt's replica set, as soon as
        the replica is ready."""
        self._replica_set = replica_set
        for index in self._of(PartHealth.CATCHING_UP):
            self._join(replica_set, index)
        self._await_table(replica_set, (0, 0))

    def begin_set_again(self, replica_set: ReplicaSetRoom) -> Ref[None]:
        """Starts the actor of `replica_set` again after its loss, as a new incarnation with all replicas that had
        joined. Returns a reference that is ready when the set has started."""
        members = self._of(PartHealth.CATCHING_UP, PartHealth.HEALTHY, PartHealth.DRAINING)
        clients = {index: self._replicas.client(index) for index in members}
        started = replica_set.begin_again(clients, {index: self._lives[index].generation for index in members})
        self._table = None
        for index in self._of(PartHealth.DRAINING):
            self._drain(replica_set, index)
        self._await_table(replica_set, (0, 0))
        return started

    def detach(self) -> None:
        """Ends an attempt: aborts all requests of replicas, forgets the replica set, and removes replicas that were
        leaving."""
        if self._replica_set is None:
            return
        self._replica_set = self._table = None
        for index in self._of(PartHealth.CATCHING_UP, PartHealth.HEALTHY):
            self._become(index, PartHealth.CATCHING_UP)
            self._lives[index].gone_since = math.inf
        for index in self._of(PartHealth.DRAINING):
            self._take_away(index)
        self._replicas.abort_all()

    def missing(self, all_of_them: bool) -> list[str]:
        """Returns the names of the replicas that do not serve yet. With `all_of_them` False, returns an empty list as
        soon as one replica serves."""
        if not all_of_them and self._of(PartHealth.HEALTHY):
            return []
        return [self._replicas.name(index) for index in self._of(PartHealth.STARTING, PartHealth.CATCHING_UP)]

    def placeless(self) -> list[str]:
        """Returns the names of the starting replicas that wait for a place in the cluster."""
        starting = self._of(PartHealth.STARTING)
        return [self._replicas.name(index) for index in starting if self._lives[index].placeless]

    def look(self) -> None:
        """Does the work that is due. Replaces a replica once the replica set has reported it as gone for
        SECOND_OPINION_S. If a request did not reach the replica, the replacement waits until Ray knows if the replica
        lives. Fails replicas that take too long to start. If a replica was lost and not replaced, because the restart
        budget was used up, starts another replica in its place after `cluster.restart_window_s`."""
        now = time.monotonic()
        for index in self._of(PartHealth.CATCHING_UP, PartHealth.HEALTHY):
            reason = self._reason(index)
            if reason:
                life = self._lives[index]
                life.gone_since = min(life.gone_since, now)
                if now - life.gone_since >= SECOND_OPINION_S and not self._monitor.is_unreached(_part_name(index)):
                    self._fail(index, str(reason))
        for index in filter(self._reason, self._of(PartHealth.DRAINING)):
            self._take_away(index)
        for index in [index for index, life in self._lives.items() if life.deciding_until <= now]:
            self._monitor.drop(_part_name(index))
            self._succeed(index, self._lives[index].lost_engine)
        self._look_at_starts(now)
        for again in [entry for entry in self._left_out if entry[0] <= now and not self._is_asleep]:
            self._left_out.remove(again)
            index = self._add(again[1])
            self._roster.note(_part_name(index), "starts in the place of a replica that was left out")

    @property
    def _is_asleep(self) -> bool:
        """True if the newest table says that all replicas sleep. The trainer then has the memory of their devices."""
        return self._table is not None and self._table.asleep

    def serves(self, index: int) -> bool:
        """Returns True if replica `index` is healthy and takes requests of this attempt."""
        return index in self._lives and self._lives[index].state is PartHealth.HEALTHY

    def lost(self, index: int, failure: TriremeError, died: bool) -> None:
        """Replaces replica `index`, which was lost with `failure`. If the restart budget is used up but enough other
        replicas remain, the run continues without this replica. If the replica was leaving, only removes it. If the
        replica can neither be replaced nor spared, raises the error that ends the run. `died`: the replica's process
        ended."""
        if self._replica_set:
            self._replica_set.actor.leave.remote(index, str(failure))
        life = self._lives[index]
        if life.state is PartHealth.DRAINING:
            self._take_away(index)
            return
        if isinstance(failure, BadInput):
            raise failure
        try:
            self._again(self._replicas.name(index), failure, died)
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
        self._lives[index] = replace(life, state=PartHealth.STARTING, since=now, deciding_until=now + ALIVE_S)
        self._monitor.wait_for(lost_engine, _part_name(index), partial(self._succeed, index))

    @property
    def running(self) -> int:
        """Number of replicas that take memory: all replicas, whatever their state, including DRAINING."""
        return len(self._lives)

    def added(self, target: int) -> int:
        """Returns how many replicas `scale(target)` would start. Leaving replicas do not count as present."""
        return max(0, target - len(self._lives) + len(self._of(PartHealth.DRAINING)))

    def scale(self, target: int) -> str:
        """Changes the number of replicas to `target`: starts some, or makes some leave after their present requests.
        Returns a sentence for people about the changes. From then on, `look` no longer starts replicas in the place of
        lost ones that were not replaced."""
        staying = [index for index, life in self._lives.items() if life.state is not PartHealth.DRAINING]
        while self._left_out:
            self._places.give_back(self._left_out.pop()[1])
        for _ in range(target - len(staying)):
            self._add(self._places.take())
        for index in staying[target:][::-1]:
            self._leave(index)
        change = target - len(staying)
        if not change:
            return f"there are {target} already"
        if change > 0:
            effect = f"{change} more to start"
        else:
            effect = f"{-change} to leave, once they have done what they sample"
        return f"{count(len(staying), 'replica')}; {effect}"

    # ---------------------------------------------------------------------------------------------- one replica's way

    def _add(self, options: ActorOptions) -> int:
        index = self._replicas.add(options)
        self._starts(index, self._replicas.ready_ref(index))
        return index

    def _succeed(self, index: int, lost_engine: object = False) -> None:
        """Starts a process in the place of replica `index`, which was lost. `lost_engine` True: the replica's actor
        lives and has lost only its engine, so this actor starts another engine. Any other value: a new actor is
        started.

        While the replicas sleep, the trainer has the memory that an engine needs to start. Then nothing is started yet,
        and `look` tries again later.
        """
        if self._is_asleep:
            life = self._lives[index]
            until = time.monotonic() + ASLEEP_S
            self._lives[index] = replace(
                life, state=PartHealth.STARTING, deciding_until=until, lost_engine=lost_engine is True
            )
            self._roster.set(_part_name(index), PartHealth.STARTING, WAITS_FOR_WAKING)
            return
        self._starts(index, self._replicas.replace(index, same_actor=lost_engine is True), successor=True)

    def _starts(self, index: int, ready: Ref[object], successor: bool = False) -> None:
        self._lives[index] = _Life((0, next(self._numbers)), PartHealth.STARTING, time.monotonic(), successor)
        self._places_next = 0.0
        self._roster.set(_part_name(index), PartHealth.STARTING, pids=(), successor=successor)
        self._monitor.wait_for(ready, _part_name(index), partial(self._started, index))

    def _started(self, index: int, outcome: object) -> None:
        if isinstance(outcome, TriremeError):
            self._fail(index, str(outcome), outcome)
            return
        self._monitor.add(_part_name(index), partial(self._replicas.heartbeat_ref, index))
        self._become(index, PartHealth.CATCHING_UP)
        if self._replica_set:
            self._join(self._replica_set, index)

    def _join(self, replica_set: ReplicaSetRoom, index: int) -> None:
        replica_set.actor.join.remote(index, self._replicas.client(index), self._lives[index].generation)

    def _await_table(self, replica_set: ReplicaSetRoom, after: Number) -> None:
        take = partial(self._take, replica_set, replica_set.incarnation)
        self._monitor.wait_for(replica_set.table(after, TABLE_S), TABLES, take)

    def _take(self, replica_set: ReplicaSetRoom, incarnation: int, table: ReplicaTable | TriremeError) -> None:
        """Stores `table`, the newest table of `replica_set`, and updates the states of the replicas: which serve, and
        which do not. Asks for the next table. Ignores a table of an earlier attempt or of another `incarnation` of the
        set."""
        is_present = replica_set is self._replica_set and replica_set.incarnation == incarnation
        if not is_present or isinstance(table, TriremeError):
            return  # the attempt has ended, or the monitor will say that the set is lost
        changes = table.asleep is not self._is_asleep
        self._table = table
        self._await_table(replica_set, table.number)
        for index in self._of(PartHealth.CATCHING_UP, PartHealth.HEALTHY):
            life = self._lives[index]
            serves = table.serves(index, life.generation)
            if serves is None:
                continue
            if serves is not self.serves(index):
                self._become(index, PartHealth.HEALTHY if serves else PartHealth.CATCHING_UP)
            if serves and changes:
                self._roster.set(_part_name(index), PartHealth.HEALTHY, ASLEEP if table.asleep else "")
            if serves and life.successor:
                life.successor = False  # it joins the next attempt as any other
                took = time.monotonic() - life.since
                self._roster.note(_part_name(index), f"its successor serves, {took:.1f} s after it was started")

    def _reason(self, index: int) -> TriremeError | None:
        """Returns the error with which the newest table reports replica `index` as gone; None if no table reports
        this."""
        if self._table is None:
            return None
        return self._table.reason(index, self._lives[index].generation)

    def _leave(self, index: int) -> None:
        if self._replica_set is None or self._lives[index].state is PartHealth.STARTING:
            self._take_away(index)
            return
        self._become(index, PartHealth.DRAINING)
        self._drain(self._replica_set, index)

    def _drain(self, replica_set: ReplicaSetRoom, index: int) -> None:
        replica_set.actor.drain.remote(index, self._config.timeouts.update_s)

    def _take_away(self, index: int) -> None:
        self._places.give_back(self._remove(index))

    def _remove(self, index: int) -> ActorOptions:
        self._monitor.drop(_part_name(index))
        options = self._replicas.remove(index)
        del self._lives[index]
        self._roster.remove(_part_name(index))
        return options

    def _become(self, index: int, state: PartHealth) -> None:
        self._lives[index].state = state
        self._roster.set(_part_name(index), state)

    # -------------------------------------------------------------------------------------------------------- failures

    def _look_at_starts(self, now: float) -> None:
        """Fails replicas that do not start within `timeouts.start_s`; time without a place in the cluster does not
        count. `now`: seconds of the monotonic clock."""
        starting = [i for i in self._of(PartHealth.STARTING) if self._lives[i].deciding_until == math.inf]
        if starting and now >= self._places_next:
            self._places_next = now + PLACES_S
            placed = self._places.are_there([self._replicas.options(index) for index in starting])
            for index, is_there in zip(starting, placed, strict=True):
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
        """Returns True if a lost replica may be left out: at least `cluster.min_replicas` remain without it, restarts
        are allowed, and the run is not deterministic."""
        cluster = self._config.cluster
        if self._config.deterministic or not cluster.max_restarts:
            return False
        return len(self._lives) > cluster.min_replicas

    def _leave_out(self, index: int, refusal: TriremeError) -> None:
        retry_s = self._config.cluster.restart_window_s
        part = self._roster.part(_part_name(index))
        place = f" (node {part.node})" if part and part.node else ""
        self._left_out.append((time.monotonic() + retry_s, self._remove(index)))
        goes_on = f"the run goes on with {count(len(self._lives), 'replica')}, and tries another in {retry_s:g} s"
        self._roster.note(_part_name(index), f"is left out{place}; {goes_on}: {refusal}")

    def _fail(self, index: int, reason: str, failure: TriremeError | None = None) -> None:
        name = self._replicas.name(index)
        failure = failure or RoomFailed(reason if reason.startswith(name) else f"{name}: {reason}")
        self._monitor.drop(_part_name(index))
        self._roster.set(_part_name(index), PartHealth.DEAD, str(failure))
        self._roster.note(_part_name(index), str(failure))
        self.lost(index, failure, waits.died(failure))

    def _of(self, *states: PartHealth) -> list[int]:
        return [index for index, life in sorted(self._lives.items()) if life.state in states]
