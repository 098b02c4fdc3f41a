"""Watches all actors of a run from a thread of the driver, and starts successors of lost actors.

heartbeats   Every process must send a heartbeat once a second. A process that is silent for timeouts.heartbeat_s writes
             its stacks to its log and is killed (`heartbeats.py`). A replica's actor watches its engine likewise.
replicas     The requests of a lost replica move to other replicas. Its successor loads the newest weights and serves,
             while the run continues (`replica_manager.py`).
replica set  A lost replica set gets a successor, too. Replicas and their requests continue.
core         This is the trainer and the orchestrator (for `sft` the trainer alone). If one of them is lost, `check`
             raises the reason in the driver's thread, which ends the attempt. Both are built again from the newest
             checkpoint, and replicas stay (`trireme.launch.run.attempts`). In deterministic mode a lost replica ends
             the attempt as well, because the whole step must be sampled again.
services     These are Ray's processes, if the command started them. If one ends, all actors end. `check` raises the
             error, and Ray is started again (`trireme.launch.run.launch`).
budget       A part may be started again only a limited number of times (`restarts.py`). Beyond it `check` raises the
             error that ends the run.
scale        `trireme scale` requests more or fewer replicas (`status.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from trireme.config import CommonConfig, Config
from trireme.config.run import START_LIMIT
from trireme.core.actors import Ref
from trireme.core.errors import BadInput, RoomFailed, ServicesLost, TriremeError
from trireme.core.sampler import Heartbeat
from trireme.process import waits
from trireme.process.environ import STACKS
from trireme.process.ray_cluster import PlacePool, Progress, check_services
from trireme.process.signals import StoppedWithoutCheckpoint
from trireme.supervision.heartbeats import EVERY_S, HeartbeatMonitor, kill, send
from trireme.supervision.replica_manager import ReplicaActors, ReplicaManager, ReplicaSetRoom
from trireme.supervision.restarts import Restarts
from trireme.supervision.roster import PartHealth, Roster
from trireme.supervision.status import ScaleRequests

TICK_S = 0.2
REPLICA_SET = "replica_set_0"
ROUND_S = 2 * EVERY_S
"""Within this time every process gets another heartbeat request."""
log = logging.getLogger(__name__)


class Room(Protocol):
    """A room of an attempt, as its driver sees it."""

    def ready_refs(self) -> tuple[Sequence[Ref[object]], Sequence[str]]:
        """Returns references that are ready when the room's actors have started, and the actors' names."""

    def heartbeats(self) -> Mapping[str, Callable[[], Ref[Heartbeat]]]:
        """Returns {name in the roster: function} for each process of the room. The function requests a Heartbeat and
        returns Ray's reference to it."""


@dataclass(frozen=True)
class ElasticReplicas:
    """The replicas of a run or a service, and the objects with which the supervisor changes the number of replicas."""

    config: Config
    replicas: ReplicaActors
    requests: ScaleRequests  # for more or fewer replicas
    places: PlacePool  # for added replicas
    check_number: Callable[[int, int], None]
    """Called with the number of all replicas and the number of replicas to add. Raises BadInput if the machines cannot
    hold them, RoomFailed if that is unknown. May take seconds, because it may send requests to nodes."""


class Supervisor:
    """Monitors the actors of a run in a thread (see the module). Enter and call it only from the driver's main thread.

    `core`: the name that messages use for the rooms that are rebuilt together. `roster` receives the health of parts,
    and incidents. `elastic`: the replicas; None if the run has none.
    """

    def __init__(self, config: CommonConfig, roster: Roster, core: str, elastic: ElasticReplicas | None = None) -> None:
        self.roster = roster
        self._config = config
        self._core = core
        self._elastic = elastic
        self._restarts = Restarts(config.cluster.max_restarts, config.cluster.restart_window_s)
        self._monitor = HeartbeatMonitor(roster, config.timeouts.heartbeat_s, self._lost)
        self._replica_set: ReplicaSetRoom | None = None  # the handle of that of the attempt
        self._manager: ReplicaManager | None = None
        if elastic:
            replicas = elastic.replicas
            places = elastic.places
            self._manager = ReplicaManager(elastic.config, replicas, roster, self._monitor, self._again, places)
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="supervisor", daemon=True)
        self._attempts = 0
        self._ended_at = 0.0  # when the attempt before this one ended
        self._core_failure: TriremeError | None = None
        self._fatal: TriremeError | None = None

    def __enter__(self) -> Supervisor:
        if self._manager:
            self._manager.begin()
        try:
            self._thread.start()
        except BaseException:  # a signal came in `start`, whose thread runs: it must not outlive Ray, whose calls crash
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(self._config.timeouts.heartbeat_s)

    def check(self) -> None:
        """Raises the error that ends the run or this attempt, if the supervisor has found one."""
        failure = self._fatal or self._core_failure
        if failure:
            raise failure

    def expect(self, *rooms: Room) -> None:
        """Begins an attempt in the roster: sets all processes of `rooms`, which have begun to start, to STARTING."""
        self._attempts += 1
        for name in (name for room in rooms for name in room.heartbeats()):
            self.roster.set(name, PartHealth.STARTING, pids=(), successor=self._attempts > 1)

    def attach(self, *rooms: Room, replica_set: ReplicaSetRoom | None = None) -> None:
        """Begins to monitor `rooms`, which have started. Makes each replica join `replica_set` as soon as the replica
        is ready."""
        with self._lock:
            for name, ask in ((name, ask) for room in rooms for name, ask in room.heartbeats().items()):
                self.roster.set(name, PartHealth.HEALTHY)
                self._monitor.add(name, ask)
            if self._manager and replica_set:
                self._replica_set = replica_set
                self._manager.attach(replica_set)

    def await_replicas(self, log: Path, progress: Progress) -> None:
        """Waits until replicas serve: all of them in the first attempt and in deterministic mode, else one. Time
        without a place in the cluster does not count as start time; `timeouts.place_s` limits it. `log`: the directory
        of logs that errors name. Raises RoomFailed if replicas take too long, and the errors of `check`."""
        all_of_them = self._attempts == 1 or self._config.deterministic
        timeouts = self._config.timeouts
        started = placed = time.monotonic()
        while True:
            with self._lock:
                if self._manager:
                    missing = self._manager.missing(all_of_them)
                else:
                    missing = []
                if self._manager and missing:
                    placeless = self._manager.placeless()
                else:
                    placeless = []
            if not missing:
                return
            self.check()
            now = time.monotonic()
            started, placed = (now, placed) if placeless else (started, now)
            if now - started > timeouts.start_s:
                limit = f"{timeouts.start_s:.0f} s ({START_LIMIT})"
                raise RoomFailed(f"waited {limit} for {', '.join(missing)} to start; logs: {log}")
            if now - placed > timeouts.place_s:
                wait = f"a place in the cluster for {', '.join(placeless)}"
                raise RoomFailed(
                    f"Ray did not find {wait} within {timeouts.place_s:.0f} s (timeouts.place_s). Add a node to the "
                    "cluster"
                )
            progress(
                [f"a place in the cluster for {name}" for name in placeless] or missing, now - min(started, placed)
            )
            time.sleep(TICK_S)

    def goes_on(self, *retained: str) -> None:
        """Records an incident after a loss: the new attempt has loaded its checkpoint and continues. Does nothing in
        the first attempt. `retained`: texts on the unfinished work that the new attempt continues; the checkpoint holds
        this work."""
        if self._attempts > 1:
            self.roster.note_return(self._core, time.monotonic() - self._ended_at, *retained)

    def detach(self, failure: BaseException | None) -> None:
        """Ends the attempt before its rooms are stopped: stops monitoring them. `failure`: the error that ended the
        attempt; None if the attempt reached its end. If a room hangs, first makes all monitored processes write the
        stacks of their threads to their logs."""
        self._ended_at = time.monotonic()
        if isinstance(failure, StoppedWithoutCheckpoint):
            failure = failure.failure or failure
        if failure and waits.unreached(failure):
            self._await_verdict()
        may_go_on = isinstance(failure, RoomFailed)
        with self._lock:
            monitored = self._monitor.names
        if failure and may_go_on and failure is not self._core_failure and not waits.died(failure):  # it hangs
            send([part for part in self.roster.parts if part.name in monitored], STACKS)
        with self._lock:
            for name in self._monitor.names:
                if ReplicaManager.index_of(name) is None or not may_go_on:
                    self._monitor.drop(name)
            self._replica_set = None
            if may_go_on and self._manager:
                self._manager.detach()

    def _await_verdict(self) -> None:
        """Waits until Ray knows for each process whether it lives, or until a process is found lost, but at most
        `timeouts.heartbeat_s`. Without this wait, Ray would place new actors on a lost node that it has not given up
        yet."""
        while not self._fatal and not self._core_failure:
            waited = time.monotonic() - self._ended_at
            with self._lock:
                unknown = any(map(self._monitor.is_unreached, self._monitor.names))
            if waited > (self._config.timeouts.heartbeat_s if unknown else ROUND_S):
                return
            time.sleep(TICK_S)

    def may_rebuild(self, failure: RoomFailed) -> None:
        """Counts a restart after `failure`, which ended the attempt. Returns if the rooms may be built again, else
        raises the error that ends the run."""
        with self._lock:
            if self._fatal:
                raise self._fatal from failure
            lost = self._core_failure
            self._core_failure = None
            if lost is None:
                self.roster.note(self._core, str(failure))
            self._again(self._core, lost or failure, lost is not None or waits.died(failure))

    # ------------------------------------------------------------------------------------------------------ the thread

    def _follow(self) -> None:
        """The function of the supervisor's thread: monitors the run until `__exit__` is called or Ray's processes are
        lost. If an unexpected error ends the thread, `check` raises a RoomFailed that ends the run, because a run must
        not continue unsupervised."""
        try:
            while not self._ending.is_set():
                self._turn()
        except Exception as error:
            log.exception("the supervisor")
            self._fatal = self._fatal or RoomFailed(f"the supervisor of the run: {type(error).__name__}: {error}")

    def _turn(self) -> None:
        try:
            check_services()
        except ServicesLost as lost:
            self._fatal = self._fatal or lost
            self._ending.set()  # most of Ray's calls would wait for the services
            return
        with self._lock:
            refs = self._monitor.refs()
        outcomes = waits.ready(refs, TICK_S)
        with self._lock:
            for ref, outcome in outcomes.items():
                self._guarded(partial(self._monitor.arrived, ref, outcome))
            silent = self._monitor.look()
            if self._manager and self._elastic:
                self._guarded(self._manager.look)
        if self._manager and self._elastic:
            self._guarded(partial(self._scale, self._manager, self._elastic))
        if silent:
            kill(silent)  # without the lock: it takes seconds when their nodes do not answer
            with self._lock:
                self._guarded(partial(self._monitor.end, silent))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Calls `work`. If it raises a TriremeError, that is kept as the error that ends the run, and `check` raises it
        in the main thread. An error that was kept earlier stays."""
        try:
            work()
        except TriremeError as error:
            self._fatal = self._fatal or error

    def _lost(self, name: str, failure: TriremeError, died: bool) -> None:
        index = ReplicaManager.index_of(name)
        if name == REPLICA_SET and self._manager and self._replica_set and not self._config.deterministic:
            self._again(name, failure, died)
            self.roster.set(name, PartHealth.STARTING, pids=(), successor=True)
            started = self._manager.begin_set_again(self._replica_set)
            self._monitor.wait_for(started, name, partial(self._set_started, self._replica_set))
            return
        if index is None or not self._manager or (self._config.deterministic and self._manager.serves(index)):
            self._core_failure = self._core_failure or failure
        if index is not None and self._manager:
            self._manager.lost(index, failure, died)

    def _set_started(self, replica_set: ReplicaSetRoom, outcome: object) -> None:
        if replica_set is not self._replica_set:
            return  # the attempt has ended
        if isinstance(outcome, TriremeError):
            self._lost(REPLICA_SET, outcome, waits.died(outcome))
            return
        self.roster.set(REPLICA_SET, PartHealth.HEALTHY)
        self.roster.note(REPLICA_SET, f"its successor, incarnation {replica_set.incarnation}, has all replicas")
        self._monitor.add(REPLICA_SET, *replica_set.heartbeats().values())

    def _again(self, part: str, failure: TriremeError, died: bool) -> None:
        self._restarts.take(part, failure, died=died, step=self.roster.step, now=time.monotonic())

    def _scale(self, manager: ReplicaManager, elastic: ElasticReplicas) -> None:
        request = elastic.requests.poll()
        if request is None:
            return
        try:
            with self._lock:
                added = manager.added(request.replicas)
                number = manager.running + added  # at once: some may be leaving
            if added:
                elastic.check_number(number, added)  # without the lock: it takes seconds when nodes do not answer
            with self._lock:
                accepted = True
                answer = manager.scale(request.replicas)
        except (BadInput, RoomFailed) as refusal:
            accepted = False
            answer = str(refusal)
        with suppress(OSError):  # the disk is full: the request comes again, and finds as many replicas
            elastic.requests.answer(request, answer, accepted=accepted)
