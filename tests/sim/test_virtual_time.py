"""The virtual clock itself: order, timeouts, deadlocks, and what it refuses."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import Deadlock, run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> float:
        await asyncio.sleep(86399)
        return now()

    assert run(main()) == 86399


def test_sleepers_wake_in_order_of_time_and_then_of_request() -> None:
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((name, now()))

    async def main() -> None:
        await asyncio.gather(sleeper("c", 3), sleeper("a", 1), sleeper("b", 1.5), sleeper("d", 3))

    run(main())
    assert woken == [("a", 1), ("b", 1.5), ("c", 3), ("d", 3)]


def test_time_stands_still_while_anything_is_ready() -> None:
    async def main() -> float:
        asyncio.get_running_loop().call_later(1, lambda: None)
        for _ in range(1000):
            await asyncio.sleep(0)
        return now()

    assert run(main()) == 0


def test_call_at_and_cancelled_timers() -> None:
    fired: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(5, lambda: fired.append(now()))
        loop.call_at(2, lambda: fired.append(-1)).cancel()
        await asyncio.sleep(10)

    run(main())
    assert fired == [5]


def test_timeouts_end_what_takes_longer() -> None:
    async def main() -> list[float]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        first = now()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(100), 3)
        async with asyncio.timeout(50):
            await asyncio.sleep(20)
        return [first, now()]

    assert run(main()) == [7, 30]


def test_many_small_steps_add_up() -> None:
    async def main() -> float:
        for _ in range(10_000):
            await asyncio.sleep(0.1)
        return now()

    assert run(main()) == pytest.approx(1000)


@pytest.mark.parametrize("deadline", [None, 1e9])
def test_nothing_will_ever_happen(deadline: float | None) -> None:
    """A deadline that is years away does not hide it. The error names who waits, where."""

    async def waits_for_godot() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.timeout(deadline):
            await asyncio.gather(waits_for_godot(), waits_for_godot())

    with pytest.raises(Deadlock, match=r"(?s)at 0 s .* 3 tasks wait:.*2 x Event\.wait, .*locks\.py:\d+"):
        run(main())


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(RuntimeError, match="under a virtual clock"):
        run(main())

    async def other() -> None:
        asyncio.get_running_loop().call_soon_threadsafe(print)

    with pytest.raises(RuntimeError, match="comes from a thread"):
        run(other())
