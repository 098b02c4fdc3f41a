"""The replica set in its actor: the driver's handle, and how routers in other processes read its tables."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from inference.replica_set.actor import ReplicaSet
from inference.replica_set.table import Generation, Number, Table
from trireme.config import Config
from trireme.core.actors import ActorProxy, Ref
from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import Heartbeat
from trireme.core.transport import Epochs, Offer, Session
from trireme.core.types import WeightIdentity
from trireme.core.weights import PublishedWeights
from trireme.process import waits
from trireme.process.ray_cluster import create_actor, on_node

if TYPE_CHECKING:
    from inference.handle import ReplicaClient

WAIT_S = 20.0
"""Seconds that a router waits for a newer table in one call."""
ANSWER_S = 30.0
"""Seconds that an answer of the replica set may take in addition to the work itself."""
AGAIN_S = 1.0
"""Seconds between a request that failed, because the set was lost, and the next request."""
NAME = "replica set"
log = logging.getLogger(__name__)


@dataclass
class RemoteSet:
    """A router's access to a replica set in another process: reads the set's tables and reports failures to the set.
    Picklable."""

    actor: ActorProxy[ReplicaSet]
    _reading: asyncio.Task[None] | None = None

    def listen(self, take: Callable[[Table], object]) -> None:
        """Calls `take` with each new table of the replica set, in a task that ends when the set is dead. Then the last
        table stays in use until the router follows another source."""
        self._reading = asyncio.get_running_loop().create_task(self._read(take))

    async def table(self, after: Number, wait_s: float) -> Table:
        """Waits up to `wait_s` seconds for a table with a higher number than `after`. Returns the replica set's newest
        table. Raises RoomFailed if there is no answer within `wait_s` + ANSWER_S seconds."""
        answer = self.actor.table.remote(after, wait_s)
        return await waits.get_async(answer, owner=f"{NAME} (its table)", timeout_s=wait_s + ANSWER_S)

    async def _read(self, take: Callable[[Table], object]) -> None:
        after: Number = (0, 0)
        while True:
            try:
                table = await self.table(after, WAIT_S)
            except RoomFailed as failure:
                if waits.died(failure):
                    log.warning("%s; the replicas that it named last are used", failure)
                    return
                await asyncio.sleep(AGAIN_S)
                continue
            after = table.number
            take(table)

    def report(self, index: int, generation: Generation, failure: TriremeError) -> None:
        """Reports to the replica set that a call from this process to replica `index` raised `failure`; does not
        wait."""
        self.actor.report.remote(index, generation, failure)


class ReplicaSetHandle:
    """The driver's handle of the replica set's actor. Only `offer` and `sleep` wait for the actor."""

    def __init__(
        self,
        config: Config,
        log_dir: Path | None,
        incarnations: Iterator[int] | None = None,
        adopt: WeightIdentity | None = None,
    ) -> None:
        """Starts the actor on this node; does not wait. `incarnations` yields the number of each incarnation (None: 1,
        2, ...). A number must be higher than the incarnation of every table that the same routers have read before.
        `adopt`: a name for the weights that the replicas loaded from disk, so that they need no first update."""
        self._config = config
        self._log_dir = log_dir
        self._adopt = adopt
        self._incarnations = incarnations or itertools.count(1)
        self._weights: PublishedWeights | None = None  # of the newest update
        self._sleeping = False
        self._ordering = threading.Lock()
        """Held while a thread chooses what the replicas have to do and sends it to the actor, without waiting: a new
        incarnation must not get an older update, or an update instead of sleep, after a newer call of the driver."""
        self._log = log_dir and log_dir / "replica_set_0.log"
        self._epochs = Epochs()
        self.followers: list[Callable[[RemoteSet], object]] = []
        """Functions to call with `source` when a new incarnation has replaced a lost one."""
        self._start({}, {})

    def _start(self, clients: Mapping[int, ReplicaClient], generations: Mapping[int, Generation]) -> None:
        config = self._config
        self.incarnation = next(self._incarnations)
        place = on_node(ray.get_runtime_context().get_node_id())
        self.actor = create_actor(ReplicaSet, num_cpus=0, scheduling_strategy=place)(
            clients,
            generations=generations,
            incarnation=self.incarnation,
            lowest=self._weights.identity if self._weights else None,
            adopt=self._adopt,
            fixed=config.deterministic,
            patience_s=config.patience_s,
            update_s=config.timeouts.update_s,
        )
        self._started = self.actor.start.remote(self._log_dir)
        self.source = RemoteSet(self.actor)
        """The replica set as routers read it."""

    def begin_again(self, clients: Mapping[int, ReplicaClient], generations: Mapping[int, Generation]) -> Ref[None]:
        """Starts a new incarnation of the replica set, with the same replicas, after the old one was lost. `clients`:
        {number of a replica: its client}. `generations`: {number of a replica: its permanent name}. The new incarnation
        repeats the newest update, but if the replicas are to sleep, it puts them to sleep instead. Returns a reference
        that resolves once the new actor is ready."""
        ray.kill(self.actor)
        self._start(clients, generations)
        with self._ordering:
            if self._sleeping:
                self.actor.sleep.remote()
            elif self._weights:
                self.actor.try_update.remote(self._weights)
        for follow in self.followers:
            follow(self.source)
        return self._started

    def update(self, weights: PublishedWeights) -> None:
        """Begins to bring the replicas to `weights`; does not wait. A table says when the update has ended, even if the
        set is lost meanwhile and a later incarnation ends the update."""
        with self._ordering:
            self._weights = weights
            self._sleeping = False
            self.actor.try_update.remote(weights)

    def sleep(self, on_tick: Callable[[], None]) -> None:
        """Puts the replicas to sleep until the next update, and waits until all sleep. If the set is lost meanwhile,
        its next incarnation puts them to sleep. Calls `on_tick`, which may raise, about once a second. Raises
        RoomFailed if that takes too long; in deterministic mode raises the failure of a replica."""
        deadline = time.monotonic() + self._config.update_deadline_s
        while True:
            with self._ordering:
                self._sleeping = True
                asleep = self.actor.sleep.remote()
            try:
                waits.get_all(
                    [asleep],
                    owners=[f"{NAME} (which puts the replicas to sleep)"],
                    timeout_s=max(deadline - time.monotonic(), 0.0),
                    log=self._log,
                    on_tick=lambda *_: on_tick(),
                    limit="timeouts.update_s for each replica, and time to restart a lost replica",
                )
                return
            except RoomFailed as failure:
                if not waits.died(failure):
                    raise
            on_tick()  # first: it may have raised this failure
            time.sleep(AGAIN_S)  # the set is lost, and has a successor soon

    def table(self, after: Number, wait_s: float) -> Ref[Table]:
        """Returns a reference to the newest table. It resolves when there is a table with a higher number than `after`,
        or after `wait_s` seconds."""
        return self.actor.table.remote(after, wait_s)

    def ready_refs(self) -> tuple[list[Ref[object]], list[str]]:
        """Returns ([reference that resolves once the actor is ready], [the actor's name])."""
        return [self._started], [NAME]

    def heartbeats(self) -> Mapping[str, Callable[[], Ref[Heartbeat]]]:
        """Returns {name of the process: a function that asks it for its `Heartbeat` and returns a Ray reference}."""
        return {"replica_set_0": self.actor.heartbeat.remote}

    def offer(self, offer: Offer) -> Session:
        """Asks the replicas to receive a version while the trainer sends it. Returns the transfer to the replicas that
        are ready, perhaps to none of them, after at most `offer.ready_s` + ANSWER_S seconds. If the set is dead or does
        not answer, returns a transfer to no replica: the version can be published without the set, and the set's
        watcher, or the next call to the set, handles its failure. Raises RoomFailed for another error of the set."""
        subject = f"{NAME} (which replicas are ready for new weights)"
        limit_s = offer.ready_s + ANSWER_S
        try:
            answer = waits.get(self.actor.offer.remote(offer), owner=subject, timeout_s=limit_s, log=self._log)
        except RoomFailed as failure:
            if failure.__cause__ and not waits.died(failure):
                raise
            log.warning("%s; version %d is sent to no replica: they fetch it", failure, offer.version)
            answer = Session(offer.attempt, -1, {})
        # Replicas may wait in the groups of an answer that came too late: those of the next one are others.
        self._epochs.begins((self.incarnation, answer.epoch, answer.members))
        return replace(answer, epoch=self._epochs.number)

    def stop(self) -> None:
        """Ends the actor; the replicas stay."""
        ray.kill(self.actor)
