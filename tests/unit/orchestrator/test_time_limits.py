"""Time limits that share one timer. Each is compared with `asyncio.timeout` in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import virtual_time
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.time_limits import FEW, TimeLimit, TimeLimits

Scenario = Callable[[TimeLimits], Coroutine[Any, Any, None]]


def within(scenario: Scenario) -> None:
    virtual_time.run(scenario(TimeLimits()))


def now() -> float:
    return asyncio.get_running_loop().time()


async def wait_within(limit: TimeLimit, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Waits until `limit` is over, and then does one thing more within its block."""
    with limit:
        try:
            await asyncio.Event().wait()
        finally:
            await last()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20), st.integers(0, 30)), max_size=12))
def test_blocks_end_as_those_of_asyncio(blocks: list[tuple[int, int, int]]) -> None:
    """Blocks of different beginnings, limits and lengths, some of which end at the same time."""

    async def scenario(limits: TimeLimits) -> None:
        async def ours(begin: int, limit: int, length: int) -> tuple[str, float]:
            await asyncio.sleep(begin)
            try:
                with limits.limit(limit + 0.5) as own:
                    await asyncio.sleep(length)
            except TimeoutError:
                assert own.expired()
                return "late", now()
            assert not own.expired()
            return "whole", now()

        async def theirs(begin: int, limit: int, length: int) -> tuple[str, float]:
            await asyncio.sleep(begin)
            try:
                async with asyncio.timeout(limit + 0.5):
                    await asyncio.sleep(length)
            except TimeoutError:
                return "late", now()
            return "whole", now()

        outcomes = await asyncio.gather(*(ours(*block) for block in blocks), *(theirs(*block) for block in blocks))
        assert outcomes[: len(blocks)] == outcomes[len(blocks) :]

    within(scenario)


def test_the_inner_one_of_two_blocks_expires_alone() -> None:
    async def scenario(limits: TimeLimits) -> None:
        with limits.limit(10.0) as outer:
            with pytest.raises(TimeoutError), limits.limit(5.0) as inner:
                await asyncio.Event().wait()
            await asyncio.sleep(4.0)
        assert inner.expired()
        assert not outer.expired()

    within(scenario)


def test_the_outer_one_of_two_blocks_is_the_one_that_raises() -> None:
    async def scenario(limits: TimeLimits) -> None:
        with pytest.raises(TimeoutError), limits.limit(5.0) as outer, limits.limit(10.0) as inner:
            await asyncio.Event().wait()
        assert outer.expired()
        assert not inner.expired()

    within(scenario)


def test_a_task_that_is_cancelled_by_others_too_is_cancelled() -> None:
    async def scenario(limits: TimeLimits) -> None:
        task = asyncio.create_task(wait_within(limits.limit(5.0), partial(asyncio.sleep, 1.0)))
        await asyncio.sleep(5.5)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    within(scenario)


def test_an_error_within_the_block_is_raised_as_it_is() -> None:
    async def scenario(limits: TimeLimits) -> None:
        async def fail() -> None:
            raise ValueError("its own")

        with pytest.raises(ValueError, match="its own"):
            await wait_within(limits.limit(5.0), fail)
        assert now() == pytest.approx(5.0)

    within(scenario)


def test_a_limit_that_is_rescheduled_expires_then() -> None:
    async def scenario(limits: TimeLimits) -> None:
        async def rescheduled(seconds: float) -> None:
            with limits.limit(20.0) as limit:
                limit.reschedule(None)
                assert limit.when() is None
                await asyncio.sleep(30.0)
                limit.reschedule(now() + seconds)
                await asyncio.Event().wait()

        with limits.limit(1000.0):  # keeps the timer
            for seconds in (3.0, 50.0):
                started = now()
                with pytest.raises(TimeoutError):
                    await rescheduled(seconds)
                assert now() - started == pytest.approx(30.0 + seconds)

    within(scenario)


def test_limits_that_have_ended_are_forgotten() -> None:
    async def scenario(limits: TimeLimits) -> None:
        with limits.limit(1000.0):
            for _ in range(10 * FEW):
                with limits.limit(500.0):
                    pass
            assert len(limits._heap) <= FEW + 1
        assert not limits._heap
        assert limits._timer is None, "a loop with nothing else to do has nothing to wait for"

    within(scenario)
