"""What replicas in front of a router have in common, and the weights that they are sent."""

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from inference.handover import Outcome, Progress
from inference.replica_set.actor import ReplicaSet
from inference.replica_set.table import Table
from inference.router import Router
from trireme.core.errors import RoomFailed
from trireme.core.sampler import ReplicaStats
from trireme.core.transport import Offer
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity
from trireme.core.weights import EXACT, Canary, Drift, PublishedWeights, UpdateReport, WeightsManifest

BACKGROUND: set[asyncio.Task[Any]] = set()


def weights(version: int) -> PublishedWeights:
    canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), EXACT)
    return PublishedWeights(WeightsManifest(WeightIdentity(1, version, f"d{version}"), (), canary), ())


def in_background(work: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    BACKGROUND.add(task)
    task.add_done_callback(BACKGROUND.discard)


def router_of(
    replicas: Mapping[int, Any],
    *,
    fixed: bool = False,
    patience_s: float = 0.0,
    update_s: float = math.inf,
    kind: type[Router] = Router,
    **options: Any,
) -> Router:
    """Returns the router of a replica set in this process, which is its `source`."""
    source = ReplicaSet(replicas, fixed=fixed, patience_s=patience_s, update_s=update_s)
    return kind(source, fixed=fixed, **options)


async def joined(source: ReplicaSet, index: int, client: Any) -> None:
    """Has a replica join, and waits until it serves or waits for the next update. Raises why it is gone."""
    source.join(index, client)
    joiner = source._by_index[index]
    await asyncio.wait([joiner.catching_up])
    if joiner.failure:
        raise joiner.failure


async def losses(source: ReplicaSet) -> dict[int, str]:
    """Returns why replicas are gone that have no successor."""
    table = await source.table((0, 0), 0.0)
    return {index: str(departure.reason) for index, departure in table.departed.items() if index not in table.rows}


def lost(table: Table, handled: Collection[int] = ()) -> list[int]:
    """Returns the replicas that are gone, have no successor and are not among `handled`."""
    return [index for index in table.departed if index not in table.rows and index not in handled]


async def next_loss(source: ReplicaSet, handled: Collection[int] = ()) -> int:
    """Waits for a replica to be `lost`; `handled` may change."""
    await source._newest_table.wait_until(lambda table: bool(lost(table, handled)))
    return lost(source._newest_table.table, handled)[0]


class CutOff(Router):
    """Gets no table while it is `cut`."""

    cut = False
    missed: Table | None = None

    def take(self, table: Table) -> None:
        if not self.cut:
            super().take(table)
        elif self.missed is None or self.missed.number < table.number:
            self.missed = table

    def heal(self) -> None:
        self.cut = False
        if self.missed:
            self.take(self.missed)
            self.missed = None


def end_set(source: Any) -> None:
    """A set dies as a process does: nothing that it was doing goes on, it learns nothing more and answers nothing. (A
    replica goes on with what it was asked for.)"""

    async def table(*_: object) -> Table:
        raise RoomFailed("the replica set died")

    source._listeners.clear()
    source.report = lambda *_: None
    source.table = table
    for member in source._by_index.values():
        member.calls.end(RoomFailed("the replica set died"))
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task() and any(self is source for self in _selves(task)):
            task.cancel()


def _selves(task: asyncio.Task[Any]) -> Iterator[object]:
    """Yields the objects whose methods a task is in."""
    coroutine: Any = task.get_coro()
    while getattr(coroutine, "cr_frame", None):
        yield coroutine.cr_frame.f_locals.get("self")
        coroutine = coroutine.cr_await


async def next_incarnation(
    router: Router,
    newest: PublishedWeights | None,
    lowest: WeightIdentity | None = None,
    *,
    sleeps: bool = False,
    **options: Any,
) -> ReplicaSet:
    """The set of a router dies, and the driver gives its replicas to a successor and repeats the update to `newest`, or
    has them sleep. `lowest`: its version, unless another is given. `options`: of the successor."""
    old: Any = router.source
    end_set(old)
    rows = old._newest_table.table.rows
    successor = ReplicaSet(
        {index: row.client for index, row in rows.items()},
        generations={index: row.generation for index, row in rows.items()},
        incarnation=old._incarnation + 1,
        lowest=lowest or (newest and newest.identity),
        patience_s=old._patience_s,
        **options,
    )
    await successor.start(None)
    if newest:
        in_background(successor.try_update(newest))
    elif sleeps:
        in_background(successor.sleep())
    router.follow(successor)
    return successor


class IdleReplica:
    """Has nothing to do and nothing to say, and takes weights at once; the test adds `sample`."""

    identity: WeightIdentity | None = None
    index = 0

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        self.identity = published.identity
        return UpdateReport(self.index, published.identity, Drift(0.0, 0.0), 0, 0.0)

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Progress]:
        return {}

    async def abort(self, request_ids: Sequence[str]) -> None:
        return

    async def abort_all(self) -> None:
        return

    async def adopt(self, identity: WeightIdentity) -> None:
        self.identity = identity

    async def sleep(self) -> None:
        self.identity = None

    async def stats(self) -> ReplicaStats:
        return ReplicaStats(0, 0, 0.0, 0)


class LoadingReplica(IdleReplica):
    """Takes weights and answers while `going` is set."""

    def __init__(self, index: int) -> None:
        self.name, self.index = f"replica {index}", index
        self.going = asyncio.Event()
        self.going.set()
        self.request_count = 0
        self.fails: RoomFailed | None = None

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        self.request_count += len(requests)
        await self.going.wait()
        if self.fails:
            raise self.fails
        assert self.identity
        for number, _ in enumerate(requests):
            spans = (VersionSpan(self.identity, 0, 1),)
            yield number, SampledSequence(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", spans)

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        await self.going.wait()
        return await super().load_weights(published)

    async def offer(self, offer: Offer) -> None:
        await self.going.wait()


def sampling(router: Router, name: str) -> asyncio.Task[SampledSequence]:
    request = SampleRequest(name, (1,), SamplingParams(max_tokens=1), name)
    return asyncio.create_task(router.sample(request))


async def fleet(number: int, version: int = 3) -> tuple[Any, list[LoadingReplica]]:
    replicas = [LoadingReplica(index) for index in range(number)]
    router = router_of(dict(enumerate(replicas)), patience_s=20.0)
    await router.source.update(weights(version))
    return router, replicas


def serving(source: ReplicaSet) -> list[int]:
    return [index for index, row in source._newest_table.table.rows.items() if row.serves]
