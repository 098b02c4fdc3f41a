"""The inference room as the driver holds it: its replicas as Ray actors, and how others sample from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import ray

from inference.actor import ReplicaActor
from inference.batching_client import BatchingClient
from inference.handover import Outcome, Progress
from inference.messages import Reply, pack_requests
from inference.replica_set.actor import ReplicaSet
from inference.replica_set.handle import RemoteSet
from inference.router import Router
from trireme.config import Config
from trireme.config.model_facts import ModelFacts
from trireme.core.actors import ActorOptions, ActorProxy, Ref
from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import Heartbeat, ReplicaStats
from trireme.core.transport import Offer
from trireme.core.types import SampleRequest, WeightIdentity
from trireme.core.weights import PublishedWeights, UpdateReport
from trireme.process.ray_cluster import create_actor, shared_gpus
from trireme.process.waits import get_all, get_async, ready, with_log

MAX_CALLS = 100_000
"""Concurrent calls to one replica. Calls beyond this wait, heartbeats too."""
GRACE_S = 30.0
STOP_S = 10.0
CHAT_PROGRESS_S = 0.05
"""Seconds between the pieces of an answer that is streamed to a person; progress of other requests is fetched once a
second."""

Value = TypeVar("Value")
log = logging.getLogger(__name__)


@dataclass
class ReplicaClient:
    """Calls one replica actor for a router or replica set. Each method raises TriremeError when its call fails in the
    replica, or when the replica is dead. `update_s`: the time limit of an update, in seconds. The replica enforces this
    limit itself, and its error names the part of the update that was late. `load_weights`, `load_adapter` and `sleep`
    wait GRACE_S seconds longer, so they time out only if the replica cannot answer at all."""

    handle: ActorProxy[ReplicaActor]
    name: str
    log: Path | None
    answer_s: float
    update_s: float
    gathers: bool
    """True: requests may wait some milliseconds for others, to travel together."""

    _batching: BatchingClient | None = field(default=None, init=False)

    def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        """Samples `requests` on the replica, and yields (index into `requests`, outcome), once for each request. If the
        replica breaks, its requests end as Progress, and then the reason is raised."""
        if self._batching is None or self._batching.loop is not asyncio.get_running_loop():
            self._batching = BatchingClient(
                self._exchange, name=self.name, answer_s=self.answer_s, gathers=self.gathers
            )
        return self._batching.sample(requests)

    async def _exchange(self, caller: str, requests: list[SampleRequest], timeout_s: float) -> Reply:
        answer = self.handle.exchange.remote(caller, pack_requests(requests))
        reply = Reply.unpack(await self._get(answer, "sampling", timeout_s))
        if reply.failure:
            return replace(reply, failure=with_log(reply.failure, self.log))
        return reply

    async def progress(self, lengths: Mapping[str, int]) -> Mapping[str, Progress]:
        """Returns {request id: its new tokens} for the requests in flight that have new tokens. `lengths`: {request id:
        the number of its tokens that the caller already has}."""
        packed = await self._get(self.handle.packed_progress.remote(lengths), "asked for its progress")
        return {name: outcome for name, outcome in Reply.unpack(packed).outcomes if isinstance(outcome, Progress)}

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        """Loads `published` and returns a report. If the bytes no longer exist anywhere, raises WeightsGone, with
        nothing changed."""
        doing = f"taking version {published.identity.version}"
        return await self._get(self.handle.load_weights.remote(published), doing, self.update_s + GRACE_S)

    async def sleep(self) -> None:
        """Puts the replica to sleep, and returns when it sleeps. It samples again once it has taken an update."""
        await self._get(self.handle.sleep.remote(), "falling asleep", self.update_s + GRACE_S)

    async def load_adapter(self, name: str, published: PublishedWeights) -> None:
        """Loads an adapter on the replica; when this returns, requests may name the adapter."""
        doing = f"taking the adapter {name}"
        await self._get(self.handle.load_adapter.remote(name, published), doing, self.update_s + GRACE_S)

    async def drop_adapter(self, name: str) -> None:
        await self._get(self.handle.drop_adapter.remote(name), f"dropping the adapter {name}")

    async def offer(self, offer: Offer) -> None:
        """Makes the replica prepare to receive the offered version, and returns when it is ready. An error here does
        not mean that the replica is broken."""
        await self._get(self.handle.offer.remote(offer), f"offered version {offer.version}", offer.timeout_s)

    async def adopt(self, identity: WeightIdentity) -> None:
        await self._get(self.handle.adopt.remote(identity), "naming its weights")

    async def stats(self) -> ReplicaStats:
        return await self._get(self.handle.stats.remote(), "asked for its load")

    async def abort_all(self) -> None:
        """Ends all requests on the replica, of all callers."""
        await self._get(self.handle.abort_all.remote(), "aborting")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends the requests with these ids if they are in flight; each ends as Progress."""
        if self._batching:
            remaining = self._batching.withdraw(request_ids)
        else:
            remaining = list(request_ids)
        if remaining:
            await self._get(self.handle.abort.remote(remaining), "aborting")

    async def _get(self, awaitable: Awaitable[Value], doing: str, timeout_s: float | None = None) -> Value:
        limit = self.update_s if timeout_s is None else timeout_s
        return await get_async(awaitable, owner=f"{self.name}, {doing}", timeout_s=limit, log=self.log)


class InferenceHandle:
    """The driver's handle of all replicas: starts, replaces and ends their actors. `replicas`: {number: actor handle};
    `options`: {number: the actor's Ray options}.

    The number of a replica is never used again after `remove`.
    """

    def __init__(
        self,
        config: Config,
        replicas: dict[int, ActorProxy[ReplicaActor]],
        log_dir: Path | None,
        options: Mapping[int, ActorOptions],
    ) -> None:
        self.config = config
        self.replicas = replicas
        self.log_dir = log_dir
        self._options = dict(options)
        self._next = len(replicas)
        self._ready = {index: handle.start.remote() for index, handle in replicas.items()}

    @classmethod
    def start(cls, config: Config, options_N: list[ActorOptions], log_dir: Path | None) -> InferenceHandle:
        """Creates the replica actors, one for each entry of `options_N`. Each entry holds the Ray options of one actor.
        Calls each actor's `start` without waiting for it: see `ready_refs`."""
        options = dict(enumerate(options_N))
        return cls(config, {i: _create(config, i, options[i], log_dir) for i in options}, log_dir, options)

    # ---------------------------------------------------------------------------------------------------- one replica

    @property
    def indices(self) -> list[int]:
        return sorted(self.replicas)

    def options(self, index: int) -> ActorOptions:
        """Returns the Ray options of the actor of replica `index`."""
        return self._options[index]

    def name(self, index: int) -> str:
        return f"inference replica {index}"

    def client(self, index: int) -> ReplicaClient:
        """Returns a client that calls replica `index`, for a router or replica set; picklable."""
        if self.log_dir:
            log_file = self.log_dir / f"inference_{index}.log"
        else:
            log_file = None
        answer_s = self.config.inference.answer_s + GRACE_S
        update_s = self.config.timeouts.update_s
        gathers = not self.config.deterministic
        return ReplicaClient(self.replicas[index], self.name(index), log_file, answer_s, update_s, gathers)

    def ready_ref(self, index: int) -> Ref[None]:
        """Returns a reference that resolves when replica `index` can take weights."""
        return self._ready[index]

    def heartbeat_ref(self, index: int) -> Ref[Heartbeat]:
        """Asks replica `index` for its `Heartbeat`, and returns a Ray reference to it, which raises when the replica is
        dead or broken. The replica must have started."""
        return self.replicas[index].heartbeat.remote()

    def lost_engine_ref(self, index: int) -> Ref[bool] | None:
        """Asks replica `index` whether it has lost its engine while its actor lives. Returns a Ray reference to a bool;
        None if the replica has not started."""
        if self._has_started(index):
            return self.replicas[index].has_lost_engine.remote()
        return None

    def replace(self, index: int, *, same_actor: bool) -> Ref[None]:
        """Starts a new replica as number `index`; returns its `ready_ref`. `same_actor`: the actor lives and starts
        another engine; else the actor is killed and a new actor is created."""
        replica = self.replicas[index]
        if same_actor:
            self._ready[index] = replica.restart.remote()
            return self._ready[index]
        ray.kill(replica)  # its engine process dies with it (`inference.engine_startup`)
        return self._start(index)

    def add(self, options: ActorOptions) -> int:
        """Begins to start one more replica, with these Ray options for its actor. Returns its number."""
        index = self._next
        self._next += 1
        self._options[index] = options
        self._start(index)
        return index

    def remove(self, index: int) -> ActorOptions:
        """Kills replica `index` for good. Returns its Ray options, with which another replica can take its place."""
        ray.kill(self.replicas.pop(index))
        del self._ready[index]
        return self._options.pop(index)

    def _start(self, index: int) -> Ref[None]:
        self.replicas[index] = _create(self.config, index, self._options[index], self.log_dir)
        self._ready[index] = self.replicas[index].start.remote()
        return self._ready[index]

    def _has_started(self, index: int) -> bool:
        """Returns True if replica `index` has started; False if it has not yet, or could not."""
        outcomes = ready({self._ready[index]: self.name(index)}, timeout_s=0.0)
        return any(not isinstance(outcome, TriremeError) for outcome in outcomes.values())

    # ----------------------------------------------------------------------------------------------------------- all

    def ready_refs(self) -> tuple[list[Ref[object]], list[str]]:
        """Returns ([`ready_ref` of each replica], [the replicas' names, in the same order])."""
        return list(self._ready.values()), [self.name(index) for index in self._ready]

    def replica_set(self) -> ReplicaSet:
        """Returns a ReplicaSet of the replicas that exist now. The set is an object of this process, not an actor, so
        only routers in this process can use it. Replicas that are added later do not join the set."""
        clients = {index: self.client(index) for index in self.indices}
        return ReplicaSet(clients, fixed=self.config.deterministic, update_s=self.config.timeouts.update_s)

    def router_factory(self, source: ReplicaSet | RemoteSet, attempt: int = 0) -> partial[Router]:
        """Returns a function that makes a router over `source` in the process that calls it; picklable if `source` is.
        `attempt`: the number of the present attempt, which the router adds to each request. A replica refuses the
        request if the replica's weights are from an earlier attempt, whatever their version."""
        facts = ModelFacts.of(self.config, required=False)
        return partial(
            Router,
            source,
            fixed=self.config.deterministic,
            one_version=self.config.inference.on_update == "drain",
            vocab_size=facts.vocab_size if facts else None,
            attempt=attempt,
        )

    def chat_router_factory(self) -> Callable[[], Router]:
        """Returns a picklable function that makes a router for chats; call the router's `follow` with a replica set.
        This router asks for progress every CHAT_PROGRESS_S seconds, and does not report failed replicas to the replica
        set."""
        facts = ModelFacts.of(self.config, required=False)
        return partial(
            Router,
            vocab_size=facts.vocab_size if facts else None,
            progress_s=CHAT_PROGRESS_S,
            reports=False,
        )

    def abort_all(self) -> None:
        """Asks all replicas to end all their requests, and does not wait. Their answers are not needed any more."""
        for handle in self.replicas.values():
            handle.abort_all.remote()

    def stop(self) -> None:
        """Ends all replicas and their engine processes. Kills replicas that do not end within STOP_S, and replicas that
        are still starting, because they answer nothing while they import vLLM."""
        started = {index: handle for index, handle in self.replicas.items() if self._has_started(index)}
        starting = [handle for index, handle in self.replicas.items() if index not in started]
        for handle in starting:
            ray.kill(handle)  # its engine process, if it has one, dies with it
        stopping = [handle.stop.remote() for handle in started.values()]
        with suppress(RoomFailed):  # dead or hanging ones are killed below
            get_all(stopping, owners=[self.name(index) for index in started], timeout_s=STOP_S, log=self.log_dir)
        for handle in started.values():
            ray.kill(handle)


def _create(config: Config, index: int, options: ActorOptions, log_dir: Path | None) -> ActorProxy[ReplicaActor]:
    create = create_actor(ReplicaActor, max_concurrency=MAX_CALLS, **options)
    return create(config, index, log_dir, shared_gpus(options))
