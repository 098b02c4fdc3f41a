"""A replica set whose replicas sleep from the end of a sampling phase to the next update, and one that is lost: its
successor takes over its replicas. (In tests/sim/test_lost_sets_in_virtual_time.py one dies twice at each of its verbs.)
"""

import asyncio
from contextlib import nullcontext

import pytest
from replica_support import (
    LoadingReplica,
    fleet,
    in_background,
    joined,
    losses,
    next_incarnation,
    router_of,
    sampling,
    serving,
    weights,
)
from waiting import turns

from inference.router import Router
from trireme.core.errors import RoomFailed
from trireme.core.types import WeightIdentity


def asleep(router: Router) -> bool:
    """Returns True if the set's table says that all sleep."""
    return router.source._newest_table.table.asleep


@pytest.mark.parametrize("version", [3, 4])
async def test_requests_wait_until_an_update_wakes_the_replicas(version: int) -> None:
    """Also one to the weights that they had, and although they sleep longer than one would be waited for."""
    router, replicas = await fleet(2)
    router.source._patience_s = 0.01
    assert not asleep(router)
    await router.source.sleep()
    assert asleep(router)
    assert [replica.identity for replica in replicas] == [None, None]
    assert router.acknowledged() == {0: 3, 1: 3}, "what they had frees slots as before"
    waiting = sampling(router, "a")
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await router.source.update(weights(version))
    assert not asleep(router)
    assert [span.identity.version for span in (await waiting).spans] == [version]
    assert [replica.identity for replica in replicas] == [weights(version).identity] * 2


async def test_one_that_takes_weights_goes_to_sleep_when_it_has_them_and_one_that_joins_at_once() -> None:
    router, (first, second) = await fleet(2)
    second.going.clear()
    in_background(router.source.update(weights(4)))
    await turns()
    falling_asleep = asyncio.create_task(router.source.sleep())
    await turns()
    assert not asleep(router)
    second.going.set()
    await falling_asleep
    assert asleep(router)
    late = LoadingReplica(2)
    await joined(router.source, 2, late)
    assert asleep(router)
    assert serving(router.source) == []
    await router.source.update(weights(5))
    assert serving(router.source) == [0, 1, 2]
    assert first.identity == second.identity == late.identity == weights(5).identity


class Sleepless(LoadingReplica):
    """Falls asleep once `going` is set, or fails."""

    async def sleep(self) -> None:
        await self.going.wait()
        if self.fails:
            raise self.fails


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
async def test_one_that_does_not_fall_asleep_is_out(fixed: bool, leaves: bool) -> None:
    """Whether its call fails or its death is known first. In deterministic mode, where fewer replicas sample something
    else, that is raised."""
    sleepless = Sleepless(1)
    router = router_of({0: LoadingReplica(0), 1: sleepless}, fixed=fixed)
    await router.source.update(weights(3))
    sleepless.going.clear()
    sleepless.fails = RoomFailed("replica 1: no answer for update step 'pause'")
    falling_asleep = asyncio.create_task(router.source.sleep())
    await turns()
    if leaves:
        router.source.leave(1, "replica 1: no answer for update step 'pause'")
    else:
        sleepless.going.set()
    with pytest.raises(RoomFailed, match="replica 1: no answer for update step 'pause'") if fixed else nullcontext():
        await falling_asleep
    assert asleep(router)
    await router.source.update(weights(4))
    assert serving(router.source) == [0]


async def test_the_set_sleeps_only_when_one_that_joins_meanwhile_sleeps() -> None:
    late = Sleepless(1)
    late.going.clear()

    class First(LoadingReplica):
        async def sleep(self) -> None:
            if 1 not in router.source._by_index:
                router.source.join(1, late)

    router = router_of({0: First(0)})
    await router.source.update(weights(3))
    falling_asleep = asyncio.create_task(router.source.sleep())
    await turns()
    assert not falling_asleep.done()
    late.going.set()
    await falling_asleep
    assert asleep(router)


# ---- a set that is lost


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
