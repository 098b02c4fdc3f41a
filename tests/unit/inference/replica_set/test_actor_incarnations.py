"""A replica set that is lost has a successor, which takes over its replicas; requests and updates go on."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from replica_support import IdleReplica, in_background, joined, losses, next_incarnation, router_of, weights
from waiting import turns

from inference.handover import Outcome
from inference.replica_set.actor import ReplicaSet
from inference.router import Router
from trireme.core.errors import RoomFailed
from trireme.core.transport import Offer
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity
from trireme.core.weights import Drift, PublishedWeights, UpdateReport


class Replica(IdleReplica):
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
        self.identity = published.identity
        return UpdateReport(self.index, published.identity, Drift(0.0, 0.0), 0, 0.0)

    async def offer(self, offer: Offer) -> None:
        await self.going.wait()


def sampling(router: Router, name: str) -> asyncio.Task[SampledSequence]:
    request = SampleRequest(name, (1,), SamplingParams(max_tokens=1), name)
    return asyncio.create_task(router.sample(request))


async def fleet(number: int, version: int = 3) -> tuple[Any, list[Replica]]:
    replicas = [Replica(index) for index in range(number)]
    router = router_of(dict(enumerate(replicas)), patience_s=20.0)
    await router.source.update(weights(version))
    return router, replicas


def serving(source: ReplicaSet) -> list[int]:
    return [index for index, row in source._newest_table.table.rows.items() if row.serves]


async def test_requests_in_flight_go_on_and_new_ones_wait_until_the_update_is_repeated() -> None:
    router, (first, second) = await fleet(2)
    first.going.clear()
    second.going.clear()
    before = [sampling(router, name) for name in "ab"]
    await turns()
    successor = await next_incarnation(router, weights(3))
    after = sampling(router, "c")
    await turns()
    assert serving(successor) == []
    assert not after.done()
    first.going.set()
    second.going.set()
    await asyncio.gather(*before, after)
    assert first.request_count + second.request_count == 3, "none was asked for again"
    assert router.acknowledged() == {0: 3, 1: 3}
    assert not await losses(successor)


async def test_none_serves_below_what_was_published_before_whatever_is_repeated() -> None:
    """The driver's handle repeats no older update than it names."""
    router, _ = await fleet(2)
    successor = await next_incarnation(router, None, weights(5).identity)
    await turns()
    assert serving(successor) == [], "it trusts nothing before an update"
    for newest, expected in ((weights(4), []), (weights(5), [0, 1])):
        in_background(successor.try_update(newest))
        await turns()
        assert serving(successor) == expected
    successor = await next_incarnation(router, None, WeightIdentity(2, 0, "d"))
    joining = asyncio.create_task(joined(successor, 2, Replica(2)))
    in_background(successor.try_update(weights(7)))
    await asyncio.gather(joining)
    assert serving(successor) == [], "7 of attempt 1 is below 0 of attempt 2"


VERBS: dict[str, Callable[[ReplicaSet], Coroutine[Any, Any, object]]] = {
    "join": lambda source: joined(source, 2, Replica(2)),
    "leave": lambda source: asyncio.to_thread(lambda: None),
    "drain": lambda source: source.drain(1, math.inf),
    "offer": lambda source: source.offer(Offer(1, 4, (64,), ("here",), 60.0)),
    "update": lambda source: source.update(weights(4)),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_it_dies_twice_in_a_row_at_each_verb_and_all_serve_in_the_end(verb: str) -> None:
    router, replicas = await fleet(2)
    for replica in replicas:
        replica.going.clear()
    in_flight = [sampling(router, name) for name in "abc"]
    await turns()
    newest = weights(4 if verb == "update" else 3)
    for _ in range(2):
        at = asyncio.create_task(VERBS[verb](router.source))
        if verb == "leave":
            router.source.leave(1, "its process died")
            router.source.join(1, replicas[1])
        await turns()
        await next_incarnation(router, newest)
        at.cancel()
        await asyncio.gather(at, return_exceptions=True)
    for replica in replicas:
        replica.going.set()
    await asyncio.wait_for(router.updated(newest.identity), 5.0)
    await asyncio.wait_for(asyncio.gather(*in_flight), 5.0)
    assert {0, 1} <= set(serving(router.source))
    assert set(router.acknowledged().values()) == {newest.identity.version}


async def test_what_a_replica_did_to_a_router_while_there_was_no_set_is_told_to_the_next_one() -> None:
    router, (first, second) = await fleet(2)
    first.going.clear()
    request = sampling(router, "a")
    await turns()
    router.source.report = lambda *_: None  # it is dead
    first.fails = RoomFailed("replica 0 died")
    first.going.set()
    await request
    successor = await next_incarnation(router, weights(3))
    await turns()
    assert await losses(successor) == {0: "replica 0 died"}
    assert second.request_count == 1
