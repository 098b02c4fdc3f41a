"""Watches all actors of a run while it goes on, and replaces what is lost. A thread of the driver.

heartbeats     each process is asked for a sign of life once a second. One that is silent for timeouts.heartbeat_s, or
           has not heard from its own engine for so long, writes its stacks to its log and is killed (`watch.py`).
replicas   a lost one's requests go on elsewhere; a successor is started in its place, takes the newest weights and
           serves. The run goes on meanwhile (`fleet.py`).
the core   trainer and orchestrator (of `sft` the trainer alone). One of them lost: `check` raises what happened in
           the driver's own thread, which ends the attempt and builds both anew from the newest commit
           (`attempts.py`); replicas stay. The same when a replica is lost in deterministic mode: the step has to be
           sampled again whole.
budget     the same part is started again so often (`restarts.py`); then `check` raises what ends the run.
scale      `trireme scale` asks for more or fewer replicas (`status.py`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trireme.config import CommonConfig, Config
from trireme.core.errors import RoomFailed, TriremeError
from trireme.process import waits
from trireme.process.ray_cluster import Progress
from trireme.process.signals import RoomLost
from trireme.supervision.heartbeats import EVERY_S, HeartbeatMonitor
from trireme.supervision.replica_manager import Places, ReplicaManager, Replicas, Serving, index_of
from trireme.supervision.restarts import Restarts
from trireme.supervision.roster import PartHealth, Roster
from trireme.supervision.status import ScaleRequests

TICK_S = 0.2
ROUND_S = 2 * EVERY_S
"""Within it everyone has been asked once more."""
log = logging.getLogger(__name__)


class Watched(Protocol):
    """Processes of one room."""

    def heartbeats(self) -> Mapping[str, Callable[[], Any]]:
        """By their names in the roster: what asks each for a Heartbeat, and gives a reference to the answer."""
        ...


@dataclass(frozen=True)
class Elastic:
    """The replicas of a run of rl. `requests`: for more of them or fewer. `places` are for those that are added."""

    config: Config
    replicas: Replicas
    requests: ScaleRequests
    places: Places


class Supervisor:
    """See the module. `core`: what people call the rooms that are built anew together. To be entered by the driver's
    main thread, of which all other calls are too. `roster`: what became of whom."""

    def __init__(self, config: CommonConfig, roster: Roster, core: str, elastic: Elastic | None = None) -> None:
        self.roster = roster
        self._config, self._core, self._elastic = config, core, elastic
        self._restarts = Restarts(config.cluster.max_restarts, config.cluster.restart_window_s)
        engine_s = elastic.config.timeouts.update_s if elastic else math.inf
        self._watch = HeartbeatMonitor(roster, config.timeouts.heartbeat_s, engine_s, self._lost)
        self._fleet = (
            ReplicaManager(elastic.config, elastic.replicas, roster, self._watch, self._again, elastic.places)
            if elastic
            else None
        )
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="supervisor", daemon=True)
        self._attempts = 0
        self._ended = 0.0  # when the attempt before this one did
        self._core_failure: TriremeError | None = None
        self._fatal: TriremeError | None = None

    def __enter__(self) -> Supervisor:
        if self._fleet:
            self._fleet.begin()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(self._config.timeouts.heartbeat_s)

    def check(self) -> None:
        """Raises why the run cannot go on, or why this attempt cannot."""
        if failure := self._fatal or self._core_failure:
            raise failure

    def expect(self, *rooms: Watched) -> None:
        """These rooms of an attempt have begun to start."""
        self._attempts += 1
        for name in (name for room in rooms for name in room.heartbeats()):
            self.roster.set(name, PartHealth.STARTING, pids=(), successor=self._attempts > 1)

    def attach(self, *rooms: Watched, serving: Serving | None = None) -> None:
        """They are there: they are watched, and `serving`, one of them, gets every replica that is ready."""
        with self._lock:
            for name, ask in ((name, ask) for room in rooms for name, ask in room.heartbeats().items()):
                self.roster.set(name, PartHealth.HEALTHY)
                self._watch.add(name, ask)
            if self._fleet and serving:
                self._fleet.attach(serving)

    def await_replicas(self, log: Path, progress: Progress) -> None:
        """Returns when replicas serve: all of them, or later than at the start one that samples for training, unless
        the run is deterministic. Raises what the attempt ends with."""
        all_of_them = self._attempts == 1 or self._config.deterministic
        started = time.monotonic()
        while missing := self._missing(all_of_them):
            self.check()
            waited = time.monotonic() - started
            if waited > self._config.timeouts.start_s:
                raise RoomFailed(f"waited {waited:.0f} s for {', '.join(missing)} to start; their logs are in {log}")
            progress(missing, waited)
            time.sleep(TICK_S)

    def goes_on(self) -> None:
        """The attempt has loaded what it starts from."""
        if self._attempts > 1:
            self.roster.note_return(self._core, time.monotonic() - self._ended)

    def _missing(self, all_of_them: bool) -> list[str]:
        with self._lock:
            return self._fleet.missing(all_of_them) if self._fleet else []

    def detach(self, failure: BaseException | None) -> None:
        """The attempt ends, with `failure` if there is one: its rooms are about to be taken down. Of one that hangs,
        all actors write where they are to their logs."""
        self._ended = time.monotonic()
        failure = failure.failure if isinstance(failure, RoomLost) else failure
        if failure and waits.unreached(failure):
            self._await_verdict()
        with self._lock:
            hangs = isinstance(failure, RoomFailed) and failure is not self._core_failure and not waits.died(failure)
            if hangs:
                self._watch.write_stacks(self.roster.parts)
            may_go_on = isinstance(failure, RoomFailed)
            for name in self._watch.names:
                if index_of(name) is None or not may_go_on:
                    self._watch.drop(name)
            if may_go_on and self._fleet:
                self._fleet.detach()

    def _await_verdict(self) -> None:
        """Returns when Ray knows of everyone whether they live, or somebody was found to be lost. A node that is gone
        looks as before to Ray until it has given it up: what is started before that is placed there."""
        while not self._fatal and not self._core_failure:
            waited = time.monotonic() - self._ended
            with self._lock:
                unknown = any(map(self._watch.is_unreached, self._watch.names))
            if waited > (self._config.timeouts.heartbeat_s if unknown else ROUND_S):
                return
            time.sleep(TICK_S)

    def may_rebuild(self, failure: RoomFailed) -> None:
        """Returns if the rooms of an attempt may be built anew after `failure`, which ended it. Else raises what ends
        the run."""
        with self._lock:
            if self._fatal:
                raise self._fatal from failure
            lost, self._core_failure = self._core_failure, None
            if lost is None:
                self.roster.note(self._core, str(failure))
            self._again(self._core, lost or failure, lost is not None or waits.died(failure))

    # ------------------------------------------------------------------------------------------------------ the thread

    def _follow(self) -> None:
        """Until the end. What nobody foresaw ends the run too: it does not go on when nobody watches it."""
        try:
            while not self._ending.is_set():
                self._turn()
        except Exception as error:
            log.exception("the supervisor")
            self._fatal = self._fatal or RoomFailed(f"the supervisor of the run: {type(error).__name__}: {error}")

    def _turn(self) -> None:
        with self._lock:
            refs = self._watch.refs()
        there = waits.ready(refs, TICK_S)
        with self._lock:
            for ref, outcome in there.items():
                self._guarded(partial(self._watch.arrived, ref, outcome))
            for look in (self._watch.look, *((self._fleet.look, self._scale) if self._fleet else ())):
                self._guarded(look)

    def _guarded(self, work: Callable[[], None]) -> None:
        """A failure after which nothing may be started again ends the run: in the driver's own thread."""
        try:
            work()
        except TriremeError as error:
            self._fatal = self._fatal or error

    def _lost(self, name: str, failure: TriremeError, died: bool) -> None:
        index = index_of(name)
        if index is None or not self._fleet or (self._config.deterministic and self._fleet.serves(index)):
            self._core_failure = self._core_failure or failure
        if index is not None and self._fleet:
            self._fleet.lost(index, failure, died)

    def _again(self, part: str, failure: TriremeError, died: bool) -> None:
        self._restarts.take(part, failure, died=died, step=self.roster.step, now=time.monotonic())

    def _scale(self) -> None:
        assert self._elastic
        assert self._fleet
        if request := self._elastic.requests.poll():
            with suppress(OSError):  # the disk is full: it is asked for again, and then as many are there
                self._elastic.requests.answer(request, *self._fleet.scale(request.replicas))
