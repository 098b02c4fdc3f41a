"""A replica set that is lost has a successor, which takes over its replicas; requests and updates go on."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from replica_support import (
    LoadingReplica,
    fleet,
    in_background,
    joined,
    losses,
    next_incarnation,
    sampling,
    serving,
    weights,
)
from waiting import turns

from inference.replica_set.actor import ReplicaSet
from trireme.core.errors import RoomFailed
from trireme.core.transport import Offer
from trireme.core.types import WeightIdentity


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
    joining = asyncio.create_task(joined(successor, 2, LoadingReplica(2)))
    in_background(successor.try_update(weights(7)))
    await asyncio.gather(joining)
    assert serving(successor) == [], "7 of attempt 1 is below 0 of attempt 2"


VERBS: dict[str, Callable[[ReplicaSet], Coroutine[Any, Any, object]]] = {
    "join": lambda source: joined(source, 2, LoadingReplica(2)),
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


async def test_a_set_that_is_lost_while_its_replicas_sleep_lets_them_sleep() -> None:
    router, replicas = await fleet(2)
    await router.source.sleep()
    waiting = sampling(router, "a")
    successor = await next_incarnation(router, None, weights(3).identity, sleeps=True)
    await successor._newest_table.wait_until(lambda table: table.asleep)
    assert serving(successor) == []
    assert [replica.identity for replica in replicas] == [None, None]
    await successor.update(weights(4))
    assert [span.identity.version for span in (await waiting).spans] == [4]
