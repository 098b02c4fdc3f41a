"""Watches all actors of a run while it goes on, and replaces what is lost. A thread of the driver.

pulses     each process is asked for a sign of life once a second. One that is silent for timeouts.heartbeat_s, or
           has not heard from its own engine for so long, writes its stacks to its log and is killed (`watch.py`).
replicas   a lost one's requests go on elsewhere; a successor is started in its place, takes the newest weights and
           serves. The run goes on meanwhile (`fleet.py`).
the core   trainer and orchestrator. One of them lost: `check` raises what happened in the driver's own thread,
           which ends the attempt and builds both anew from the newest commit; replicas stay. The same when a
           replica is lost in deterministic mode: the step has to be sampled again whole.
budget     the same part is started again so often (`restarts.py`); then `check` raises what ends the run.
scale      `trireme scale` asks for more or fewer replicas (`status.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trireme import waits
from trireme.cluster import Progress
from trireme.config import Config
from trireme.errors import RoomFailed, TriremeError
from trireme.supervision.fleet import Fleet, Replicas, Serving, index_of
from trireme.supervision.restarts import Restarts
from trireme.supervision.roster import Health, Roster
from trireme.supervision.status import ScaleRequests
from trireme.supervision.watch import Watch

TICK_S = 0.2
CORE = "trainer and orchestrator"
log = logging.getLogger(__name__)


class Watched(Protocol):
    """Processes of one room."""

    def pulses(self) -> Mapping[str, Callable[[], Any]]:
        """By their names in the roster: what asks each for a Pulse, and gives a reference to the answer."""
        ...


class WatchedOrchestrator(Watched, Serving, Protocol): ...


class Supervisor:
    """See the module. `place` gives Ray's options for one replica more. To be entered by the driver's main thread, of
    which all other calls are too. `roster`: what became of whom."""

    def __init__(
        self,
        config: Config,
        replicas: Replicas,
        roster: Roster,
        requests: ScaleRequests,
        place: Callable[[], dict[str, Any]],
    ) -> None:
        self.roster = roster
        self._config, self._requests = config, requests
        self._restarts = Restarts(config.cluster.max_restarts, config.cluster.restart_window_s)
        self._watch = Watch(roster, config.timeouts.heartbeat_s, config.timeouts.update_s, self._lost)
        self._fleet = Fleet(config, replicas, roster, self._watch, self._again, place)
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="supervisor", daemon=True)
        self._attempts = 0
        self._ended = 0.0  # when the attempt before this one did
        self._core_failure: TriremeError | None = None
        self._fatal: TriremeError | None = None

    def __enter__(self) -> Supervisor:
        with self._lock:
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

    def expect(self, trainer: Watched, orchestrator: Watched) -> None:
        """Trainer and orchestrator of an attempt have begun to start."""
        self._attempts += 1
        for name in (*trainer.pulses(), *orchestrator.pulses()):
            self.roster.set(name, Health.STARTING, successor=self._attempts > 1)

    def attach(self, trainer: Watched, orchestrator: WatchedOrchestrator) -> None:
        """They are there: they are watched, and the orchestrator gets every replica that is ready."""
        with self._lock:
            for name, ask in {**trainer.pulses(), **orchestrator.pulses()}.items():
                self.roster.set(name, Health.HEALTHY)
                self._watch.add(name, ask)
            self._fleet.attach(orchestrator)

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
            self.roster.note_return(CORE, time.monotonic() - self._ended)

    def _missing(self, all_of_them: bool) -> list[str]:
        with self._lock:
            return self._fleet.missing(all_of_them)

    def detach(self, failure: BaseException | None) -> None:
        """The attempt ends, with `failure` if there is one: trainer and orchestrator are about to be taken down. Of
        one that hangs, all actors write where they are to their logs."""
        self._ended = time.monotonic()
        with self._lock:
            hangs = isinstance(failure, RoomFailed) and failure is not self._core_failure and not waits.died(failure)
            if hangs:
                self._watch.write_stacks(self.roster.parts)
            may_go_on = isinstance(failure, RoomFailed)
            for name in self._watch.names:
                if index_of(name) is None or not may_go_on:
                    self._watch.drop(name)
            if may_go_on:
                self._fleet.detach()

    def may_rebuild(self, failure: RoomFailed) -> None:
        """Returns if trainer and orchestrator may be built anew after `failure`, which ended the attempt. Raises what
        ends the run otherwise."""
        with self._lock:
            if self._fatal:
                raise self._fatal from failure
            lost, self._core_failure = self._core_failure, None
            if lost is None:
                self.roster.note(CORE, str(failure))
            self._again(CORE, lost or failure, lost is not None or waits.died(failure))

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
            for look in (self._watch.look, self._fleet.look, self._scale):
                self._guarded(look)

    def _guarded(self, work: Callable[[], None]) -> None:
        """A failure after which nothing may be started again ends the run: in the driver's own thread."""
        try:
            work()
        except TriremeError as error:
            self._fatal = self._fatal or error

    def _lost(self, name: str, failure: TriremeError, died: bool) -> None:
        index = index_of(name)
        if index is None or (self._config.deterministic and self._fleet.serves(index)):
            self._core_failure = self._core_failure or failure
        if index is not None:
            self._fleet.lost(index, failure, died)

    def _again(self, part: str, failure: TriremeError, died: bool) -> None:
        self._restarts.take(part, failure, died=died, step=self.roster.step, now=time.monotonic())

    def _scale(self) -> None:
        if request := self._requests.poll():
            with suppress(OSError):  # the disk is full: it is asked for again, and then as many are there
                self._requests.answer(request, *self._fleet.scale(request.replicas))
