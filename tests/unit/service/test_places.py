"""Places of chats: first come, first served, and no place is lost."""

import asyncio

import pytest

from service.places import Places
from service.requests import RequestRefused


async def test_places_are_given_in_order_and_come_back() -> None:
    places, order = Places(2, 10, 30.0), []
    ends = [asyncio.Event() for _ in range(5)]

    async def stay(n: int) -> None:
        async with places:
            order.append(n)
            await ends[n].wait()

    tasks = [asyncio.create_task(stay(n)) for n in range(5)]
    await asyncio.sleep(0)
    assert (order, places.taken, places.waiting) == ([0, 1], 2, 3)
    tasks[2].cancel()  # it waits
    ends[1].set()
    await asyncio.wait([tasks[1], tasks[2]])
    await asyncio.sleep(0)
    assert (order, places.taken, places.waiting) == ([0, 1, 3], 2, 1)
    places.resize(3)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == [0, 1, 3, 4]
    for end in ends:
        end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (places.taken, places.waiting) == (0, 0)


async def test_a_turn_that_comes_with_a_cancellation_is_passed_on() -> None:
    places = Places(1, 10, 30.0)
    await places.__aenter__()

    async def stay() -> None:
        async with places:
            await asyncio.sleep(3600)

    waiting = asyncio.create_task(stay())
    await asyncio.sleep(0)
    await places.__aexit__(None, None, None)  # the place is its own now, and it does not know yet
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (places.taken, places.waiting) == (0, 0)


async def test_the_queue_has_a_bound_and_a_time() -> None:
    places = Places(1, 1, 0.01)
    places.check(2)
    with pytest.raises(RequestRefused, match="at most 2") as never:
        places.check(3)  # there will never be so many places
    assert (never.value.status, never.value.retry_after_s) == (400, None)
    async with places:
        with pytest.raises(RequestRefused) as full:
            places.check(2)
        assert (full.value.status, full.value.code) == (429, "queue_full")
        with pytest.raises(RequestRefused) as late:
            async with places:
                pass
    assert (late.value.status, late.value.code) == (429, "queue_timeout")
    assert late.value.retry_after_s is not None
    assert (places.taken, places.waiting) == (0, 0)
