"""The driver's side of the service: starts its actor, gives it replica sets, and replaces a lost actor."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from service.keys import ServiceKey
from service.requests import ServedModels
from trireme.config import Config
from trireme.core.actors import ActorProxy
from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import Sampler
from trireme.process import waits
from trireme.process.ray_cluster import create_actor, on_node
from trireme.supervision.restarts import Restarts
from trireme.supervision.roster import PartHealth, Roster

if TYPE_CHECKING:
    from service.actor import ServiceActor
    from service.sessions.run_history import AttemptStart

LOOK_S = 2.0
ANSWER_S = 20.0
"""Seconds of silence after which the service's actor is killed."""
STOP_S = 10.0
ROOM = "the service"
PART = "service_0"
log = logging.getLogger(__name__)


class ServiceHandle:
    """Keeps one service running until `stop`, in a thread of its own. If the service's actor dies, the run continues: a
    new actor takes the same port and the same replica set."""

    def __init__(
        self,
        config: Config,
        make: Callable[[], ActorProxy[ServiceActor]],
        log_file: Path | None,
        say: Callable[[str], None],
        starts: list[AttemptStart],
        roster: Roster,
    ) -> None:
        """`make` makes the service's actor, with the attempts in `starts`. `say` gets messages for the user: the
        address of the service, and the loss of an actor. `roster` gets the health of the service."""
        self._config = config
        self._make = make
        self._log = log_file
        self._say = say
        self._starts = starts
        self._roster = roster
        self._lock = threading.Lock()
        self._source: Any = None
        self._ending = threading.Event()
        self._actor = make()
        self.failure: TriremeError | None = None
        """Why the service was given up; None: it was not."""
        self._thread = threading.Thread(target=self._keep, name="service", daemon=True)
        self._thread.start()

    @classmethod
    def start(
        cls,
        config: Config,
        sampler_factory: Callable[[], Sampler],
        models: ServedModels,
        keys: list[ServiceKey],
        trains: bool,
        sessions: Path,
        log_dir: Path | None,
        say: Callable[[str], None],
        roster: Roster,
        starts: Sequence[AttemptStart] = (),
    ) -> ServiceHandle:
        """Starts the service on the driver's node, without waiting for it. `trains`: True if the replicas get weights
        from a trainer. `sessions`: the directory of the store of sessions, directly below the run directory. `starts`:
        for each attempt of the run so far, its number and the version that it began with."""
        from service.actor import ServiceActor  # brings FastAPI, which runs without a service need not import

        node = ray.get_runtime_context().get_node_id()
        start_times = list(starts)

        def make() -> ActorProxy[ServiceActor]:
            create = create_actor(ServiceActor, num_cpus=0, scheduling_strategy=on_node(node))
            return create(config, sampler_factory, models, keys, trains, sessions, log_dir, start_times)

        return cls(config, make, log_dir and log_dir / f"{PART}.log", say, start_times, roster)

    def attempt_begins(self, attempt: int, version: int) -> None:
        """Tells the service that attempt number `attempt` of the run begins with the weights `version`. Versions above
        `version` that earlier attempts made are thereby given up. The service ends each session that has such a version
        as its floor (the replicas' lowest version when the session was opened) or in its tokens."""
        with self._lock:
            self._starts.append((attempt, version))
            self._actor.attempt_begins.remote(attempt, version)

    def follow(self, source: Any) -> None:
        """Sends the service's requests from now on to the replica set of a new attempt. `source`: a handle of this set
        for use in another process (`inference.replica_set.handle.RemoteSet`)."""
        with self._lock:
            self._source = source
            self._actor.follow.remote(source)

    # ---- the thread

    def _keep(self) -> None:
        cluster = self._config.cluster
        restarts = Restarts(cluster.max_restarts, cluster.restart_window_s)
        again = False
        while not self._ending.is_set():
            try:
                self._serve(again)
            except TriremeError as failure:
                if self._ending.is_set():
                    return
                again = True
                self._roster.set(PART, PartHealth.DEAD, str(failure))
                try:
                    restarts.take(ROOM, failure, died=True, step=0, now=time.monotonic())
                except TriremeError as last:
                    self.failure = last
                    self._say(f"{ROOM} is given up: {last}")
                    return
                self._say(f"{ROOM} is started again: {failure}")
                with self._lock:
                    ray.kill(self._actor)
                    if self._ending.is_set():  # `stop` would not know another one
                        return
                    self._actor = self._make()

    def _serve(self, again: bool) -> None:
        """Waits until the actor has started, and then checks its heartbeat until `stop`. `again`: True if the actor
        replaces a lost one; it then gets the replica set that the lost actor had. Raises RoomFailed when the actor is
        lost."""
        limit_s = self._config.timeouts.start_s
        self._roster.set(PART, PartHealth.STARTING, pids=(), successor=again)
        url = waits.get(self._actor.start.remote(), owner=ROOM, timeout_s=limit_s, log=self._log)
        with self._lock:
            if again and self._source:
                self._actor.follow.remote(self._source)
        self._say(f"{ROOM} answers at {url}")
        while True:
            beat = waits.get(self._actor.heartbeat.remote(), owner=ROOM, timeout_s=ANSWER_S, log=self._log)
            self._roster.set(PART, PartHealth.HEALTHY, pids=beat.pids, node=beat.node)
            if self._ending.wait(LOOK_S):
                return

    def check(self) -> None:
        """Raises RoomFailed if the service was given up, because its actor was lost more than `cluster.max_restarts`
        times within `cluster.restart_window_s`."""
        if self.failure:
            raise RoomFailed(f"{ROOM} was given up: {self.failure}")

    def stop(self) -> None:
        """Closes the port and ends the actor, after at most STOP_S seconds. No other actor takes its place."""
        self._ending.set()
        with self._lock:  # from now on there is no other one
            actor = self._actor
        with suppress(TriremeError):  # it is dead or hangs already
            waits.get(actor.stop.remote(), owner=ROOM, timeout_s=STOP_S, log=self._log)
        ray.kill(actor)
        self._thread.join(LOOK_S + ANSWER_S)
