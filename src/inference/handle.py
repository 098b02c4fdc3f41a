"""The inference room as the launcher holds it: its replicas as Ray actors, and how others sample from them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from inference.actor import ReplicaActor, ReplicaInfo
from inference.handover import Outcome, Progress
from inference.router import Router
from trireme.config import Config
from trireme.config.model_facts import ModelFacts
from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import ReplicaStats, Sampler
from trireme.core.types import SampleRequest, WeightIdentity
from trireme.core.weights import PublishedWeights, UpdateReport
from trireme.process.ray_cluster import on_node, seeing_own_gpus
from trireme.process.waits import get_all, get_async, ready

MAX_CALLS = 100_000
"""Concurrent calls to one replica. Each request may be a call of its own; calls beyond this wait, heartbeats too."""
GRACE_S = 30.0
SPARES = "a spare replica"
STOP_S = 10.0
SPARE_S = 1.0
"""What a spare has to show that it lives: the loss of a replica is told to the others in the same thread."""

log = logging.getLogger(__name__)


@dataclass
class RayReplica:
    """The router's client of one replica actor. The replica itself keeps `timeouts.update_s`, and says which step
    was late; this side waits a little longer, for a replica that can not answer at all."""

    handle: Any
    name: str
    log: Path | None
    step_s: float
    update_s: float

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        stream = self.handle.sample.remote(requests)
        who = f"{self.name}, sampling"
        while True:
            try:
                reference = await get_async(anext(stream), who=who, timeout_s=self.step_s, log=self.log)
            except StopAsyncIteration as end:
                # Its traceback and the frames in it hold each other (`wait_for`'s task has it as its exception), and
                # with them these requests, until the cycle collector comes: once in thousands of streams.
                end.__traceback__ = end.__context__ = None
                return
            for answer in await get_async(reference, who=who, timeout_s=self.step_s, log=self.log):
                yield answer

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Progress]:
        who = f"{self.name}, asked for its progress"
        return await get_async(self.handle.progress.remote(known), who=who, timeout_s=self.update_s, log=self.log)

    async def update_weights(self, published: PublishedWeights) -> UpdateReport:
        reference = self.handle.update_weights.remote(published)
        who = f"{self.name}, taking version {published.identity.version}"
        return await get_async(reference, who=who, timeout_s=self.update_s + GRACE_S, log=self.log)

    async def adopt(self, identity: WeightIdentity) -> None:
        reference = self.handle.adopt.remote(identity)
        await get_async(reference, who=f"{self.name}, naming its weights", timeout_s=self.update_s, log=self.log)

    async def stats(self) -> ReplicaStats:
        who = f"{self.name}, asked for its load"
        return await get_async(self.handle.stats.remote(), who=who, timeout_s=self.update_s, log=self.log)

    async def abort(self, request_ids: Sequence[str]) -> None:
        reference = self.handle.abort.remote(list(request_ids))
        await get_async(reference, who=f"{self.name}, aborting", timeout_s=self.update_s, log=self.log)


def make_router(clients: dict[int, RayReplica], cfg: Config, patience_s: float) -> Sampler:
    facts = ModelFacts.of(cfg, required=False)
    return Router(
        clients,
        fixed=cfg.deterministic,
        max_updating=cfg.inference.max_updating,
        one_version=cfg.inference.on_update == "drain",
        patience_s=patience_s,
        vocab_size=facts.vocab_size if facts else None,
    )


@dataclass(frozen=True)
class Spare:
    """An actor that has no engine yet. `prepared` resolves when it has imported what it needs for one."""

    handle: Any
    prepared: Any


class InferenceHandle:
    """Handle of all replicas: `replicas` {number: actor handle}, `options` {number: Ray's options of the actor}.

    Numbers are never used again. The last `eval.replicas` of those that it starts with are reserved for evaluations;
    those that are added are not.

    A spare (`inference.spare`) is a replica actor without number and engine, one on each node; `replace` prefers it to
    a new process.
    """

    def __init__(
        self, cfg: Config, replicas: dict[int, Any], log_dir: Path | None, options: Mapping[int, dict[str, Any]]
    ) -> None:
        self.cfg = cfg
        self.replicas = replicas
        self.log_dir = log_dir
        self._options = dict(options)
        self._next = len(replicas)
        self._reserved = frozenset(self.indices[len(replicas) - cfg.eval.replicas :])
        self._ready = {index: handle.start.remote() for index, handle in replicas.items()}
        self._spares: dict[str, Spare] = {}
        self._dead_spares = 0

    @classmethod
    def start(cls, cfg: Config, options_N: list[dict[str, Any]], log_dir: Path | None) -> InferenceHandle:
        """Creates one replica actor per entry of `options_N` (Ray's actor options) and returns at once."""
        options = dict(enumerate(options_N))
        return cls(cfg, {i: _create(cfg, i, options[i], log_dir) for i in options}, log_dir, options)

    # ---------------------------------------------------------------------------------------------------- one replica

    @property
    def indices(self) -> list[int]:
        return sorted(self.replicas)

    def is_reserved(self, index: int) -> bool:
        """Whether replica `index` does nothing but evaluate."""
        return index in self._reserved

    def options(self, index: int) -> Mapping[str, Any]:
        """Ray's options of its actor."""
        return self._options[index]

    def name(self, index: int) -> str:
        return f"inference replica {index}"

    def client(self, index: int) -> RayReplica:
        """What a router calls replica `index` by; picklable."""
        timeouts = self.cfg.timeouts
        return RayReplica(self.replicas[index], self.name(index), self._log(index), timeouts.step_s, timeouts.update_s)

    def ready_ref(self, index: int) -> Any:
        """Resolves (to `ReplicaInfo`) when replica `index` can take weights."""
        return self._ready[index]

    def heartbeat_ref(self, index: int) -> Any:
        """Resolves to a `Heartbeat`, at once; raises when the replica is dead, or broken for good. Once it is ready."""
        return self.replicas[index].heartbeat.remote()

    def replace(self, index: int) -> Any:
        """Ends what is left of replica `index` by force, and starts a new one in its place; as `ready_ref`."""
        lost = self._health(index)
        ray.kill(self.replicas[index])  # its engine process dies with it (`inference.engine_startup`)
        if lost and (spare := self._take_spare(lost.node)):
            self.replicas[index], self._ready[index] = spare, spare.succeed.remote(index, lost)
            return self._ready[index]
        return self._start(index)

    def add(self, options: dict[str, Any]) -> int:
        """Starts one replica more, with these options of Ray; its number."""
        index, self._next = self._next, self._next + 1
        self._options[index] = options
        self._start(index)
        return index

    def remove(self, index: int) -> dict[str, Any]:
        """Ends replica `index` for good; the options of Ray's that it had, for another."""
        ray.kill(self.replicas.pop(index))
        del self._ready[index]
        self._end_idle_spares()
        return self._options.pop(index)

    def _start(self, index: int) -> Any:
        self.replicas[index] = _create(self.cfg, index, self._options[index], self.log_dir)
        self._ready[index] = self.replicas[index].start.remote()
        return self._ready[index]

    # -------------------------------------------------------------------------------------------------------- spares

    def keep_spares(self) -> None:
        """Has one on each node with a replica that has started, if there shall be any, and until too many have died
        (`cluster.max_restarts`). Returns at once. To be called now and then: a dead one is found by this alone."""
        if not self.cfg.inference.spare:
            return
        self._end_idle_spares()
        self._drop_dead_spares()
        at = self._nodes() if self._dead_spares <= self.cfg.cluster.max_restarts else {}
        for node in at.keys() - self._spares.keys():
            options = {**self._options[at[node]], "num_cpus": 0, "num_gpus": 0, "scheduling_strategy": on_node(node)}
            handle = _create(self.cfg, None, options, self.log_dir)
            self._spares[node] = Spare(handle, handle.prepare.remote())

    def _end_idle_spares(self) -> None:
        """Where nobody is left to succeed: a node without actors may leave the cluster."""
        for node in self._spares.keys() - self._nodes().keys():
            ray.kill(self._spares.pop(node).handle)

    def _drop_dead_spares(self) -> None:
        """Those that have died or could not import. The others are asked again: an answer says nothing of later."""
        for node, spare in list(self._spares.items()):
            outcome = ready({spare.prepared: SPARES}, timeout_s=0.0)
            failure = next((value for value in outcome.values() if isinstance(value, TriremeError)), None)
            if failure:
                log.warning("%s on node %s is of no use: %s", SPARES, node, failure)
                ray.kill(self._spares.pop(node).handle)
                self._dead_spares += 1
            elif outcome:
                self._spares[node] = Spare(spare.handle, spare.handle.prepare.remote())

    def _nodes(self) -> dict[str, int]:
        """Those with replicas that have started, and a replica on each."""
        return {health.node: index for index in self.indices if (health := self._health(index))}

    def _take_spare(self, node: str) -> Any:
        """The spare on `node`, which is none any more; None unless it has all imported and lives."""
        spare = self._spares.get(node)
        if spare is None or not ready({spare.prepared: SPARES}, timeout_s=0.0):
            return None
        del self._spares[node]
        answer = ready({spare.handle.prepare.remote(): SPARES}, timeout_s=SPARE_S)
        if None in answer.values():
            return spare.handle
        ray.kill(spare.handle)
        return None

    def _health(self, index: int) -> ReplicaInfo | None:
        """Of replica `index` when it had started; None if it has not, or could not."""
        there = ready({self._ready[index]: self.name(index)}, timeout_s=0.0)
        return next((health for health in there.values() if isinstance(health, ReplicaInfo)), None)

    # ----------------------------------------------------------------------------------------------------------- all

    def ready_refs(self) -> tuple[list[Any], list[str]]:
        """References that resolve (to `ReplicaInfo`) when the replicas can take weights, and the replicas' names."""
        return list(self._ready.values()), [self.name(index) for index in self._ready]

    def router_factory(self, indices: Sequence[int] | None = None) -> Callable[[], Sampler]:
        """Makes the sampler of the replicas `indices`, in the process that will use it; picklable. Others join it
        later. None: it has all that sample for training, nobody ever joins, and it waits for nobody."""
        patience_s = self.cfg.patience_s if indices is not None else 0.0
        if indices is None:
            indices = [index for index in self.indices if not self.is_reserved(index)]
        return partial(make_router, {index: self.client(index) for index in indices}, self.cfg, patience_s)

    def abort_all(self) -> None:
        """Ends all requests on all replicas, of which nobody waits for the answers. Returns at once."""
        for handle in self.replicas.values():
            handle.abort_all.remote()

    def stop(self) -> None:
        """Ends all replicas and their engine processes, the unwilling ones by force."""
        stopping = [handle.stop.remote() for handle in self.replicas.values()]
        names = [self.name(index) for index in self.replicas]
        with suppress(RoomFailed):  # dead or hanging ones are killed below, and their engine processes with them
            get_all(stopping, who=names, timeout_s=STOP_S, log=self.log_dir)
        for handle in [*self.replicas.values(), *(spare.handle for spare in self._spares.values())]:
            ray.kill(handle)

    def _log(self, index: int) -> Path | None:
        return self.log_dir / f"inference_{index}.log" if self.log_dir else None


def _create(cfg: Config, index: int | None, options: dict[str, Any], log_dir: Path | None) -> Any:
    if index is not None:  # a spare is given those of the replica that it succeeds
        options = seeing_own_gpus(options)
    return ray.remote(ReplicaActor).options(max_concurrency=MAX_CALLS, **options).remote(cfg, index, log_dir)
