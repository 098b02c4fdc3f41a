"""All replicas sleep from the end of a sampling phase to the next update; requests wait meanwhile."""

import asyncio

import pytest
from replica_support import LoadingReplica, fleet, in_background, joined, router_of, sampling, serving, weights
from waiting import turns

from inference.router import Router
from trireme.core.errors import RoomFailed


async def asleep(router: Router) -> bool:
    """Returns True if the router knows that all sleep."""
    waiting = asyncio.create_task(router.asleep())
    await turns()
    done = waiting.done()
    waiting.cancel()
    return done


async def test_requests_wait_until_an_update_wakes_the_replicas() -> None:
    router, replicas = await fleet(2)
    assert not await asleep(router)
    await router.source.sleep()
    assert await asleep(router)
    assert [replica.identity for replica in replicas] == [None, None]
    assert router.acknowledged() == {0: 3, 1: 3}, "what they had frees slots as before"
    waiting = sampling(router, "a")
    await turns()
    assert not waiting.done()
    await router.source.update(weights(4))
    assert not await asleep(router)
    assert [span.identity.version for span in (await waiting).spans] == [4]


async def test_the_weights_that_they_had_wake_them_too() -> None:
    router, replicas = await fleet(2)
    await router.source.sleep()
    waiting = sampling(router, "a")
    await turns()
    assert not waiting.done()
    await router.source.update(weights(3))
    assert [span.identity.version for span in (await waiting).spans] == [3]
    assert [replica.identity for replica in replicas] == [weights(3).identity] * 2


async def test_one_that_takes_weights_goes_to_sleep_when_it_has_them_and_one_that_joins_at_once() -> None:
    router, (first, second) = await fleet(2)
    second.going.clear()
    in_background(router.source.update(weights(4)))
    await turns()
    in_background(router.source.sleep())
    await turns()
    assert not await asleep(router)
    second.going.set()
    await turns()
    assert await asleep(router)
    late = LoadingReplica(2)
    await joined(router.source, 2, late)
    assert await asleep(router)
    assert serving(router.source) == []
    await router.source.update(weights(5))
    assert serving(router.source) == [0, 1, 2]
    assert first.identity == second.identity == late.identity == weights(5).identity


@pytest.mark.parametrize("fixed", [False, True])
async def test_one_that_does_not_fall_asleep_is_out(fixed: bool) -> None:
    """In deterministic mode, where fewer replicas sample something else, the wait for their sleep says why."""

    class Sleepless(LoadingReplica):
        async def sleep(self) -> None:
            raise RoomFailed("replica 1: no answer for update step 'pause'")

    router = router_of({0: LoadingReplica(0), 1: Sleepless(1)}, fixed=fixed)
    await router.source.update(weights(3))
    await router.source.sleep()
    if fixed:
        with pytest.raises(RoomFailed, match="replica 1: no answer for update step 'pause'"):
            await router.asleep()
    else:
        await router.asleep()
    await router.source.update(weights(4))
    assert serving(router.source) == [0]


async def test_no_request_gives_up_because_replicas_sleep_longer_than_one_would_be_waited_for() -> None:
    router, _ = await fleet(1)
    router.source._patience_s = 0.01
    await router.source.sleep()
    waiting = sampling(router, "a")
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await router.source.update(weights(4))
    await waiting
