"""Each environment that was made is closed exactly once, whatever fails, is evicted or stops, and however slowly."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import virtual_time
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestrator_fakes import FakeSampler, Run, small_config
from watched_envs import Watched, WatchedProblem, WatchedProblems, WatchedTogether

from orchestrator.env import Env
from orchestrator.lifetimes import end_deadline_s
from trireme.core.errors import LimitReached
from trireme.core.types import SampledSequence, SampleRequest

CLOSE_S = 4.0
STEPS = 4


@dataclass(frozen=True)
class Weather:
    """The chances of what happens in any method of any environment; `slow_s` is the longest that it takes otherwise."""

    raises: float
    hangs: float
    interrupts: float
    stays: float
    """It ignores its first cancellation, for a while."""
    slow_s: float


class Stormy(WatchedProblems):
    """Environments in such weather."""

    def __init__(self, weather: Weather, seed: int, group_size: int, together: bool) -> None:
        super().__init__(self.happens, group_size, TogetherInStorm if together else InStorm)
        self.weather, self.random = weather, random.Random(seed)

    async def happens(self, env: Watched | None, method: str) -> None:
        weather, draw = self.weather, self.random.random()
        await asyncio.sleep(self.random.choice([0, 0, weather.slow_s * self.random.random()]))
        if (draw := draw - weather.raises) < 0:
            raise OSError(method)
        if (draw := draw - weather.interrupts) < 0:
            raise self.random.choice([KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
        if (draw := draw - weather.hangs) < 0:
            await asyncio.Event().wait()
        if draw - weather.stays < 0:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3)
            await asyncio.sleep(3)


class InStorm(WatchedProblem):
    async def make_env(self, sample: int) -> Env:
        await self.dataset.act(None, "make")  # type: ignore[arg-type]
        return await super().make_env(sample)


class TogetherInStorm(WatchedTogether):
    async def make_envs(self) -> Any:
        await self.dataset.act(None, "make")  # type: ignore[arg-type]
        return await super().make_envs()


class Slow(FakeSampler):
    """Takes up to ten seconds for an answer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    async def sample(self, request: SampleRequest) -> SampledSequence:
        await asyncio.sleep(10 * self.random.random())
        return await super().sample(request)


async def storm(dataset: Stormy, seed: int, policy: str, stop_s: float) -> None:
    """Trains until it is done, ends by a limit, or is stopped after `stop_s`."""
    options: dict[str, Any] = {
        **{"stale_policy": policy, "max_steps_off_policy": 1, "group_size": dataset.group_size, "retries": 1},
        **{"min_viable_group": 0.5, "max_failure_rate": 1.0, "max_filtered_batches": 1000, "generation_timeout_s": 20},
    }
    config = small_config(2, STEPS, close_s=CLOSE_S, timeout_s=5000, **options)
    run, loop = Run(config, dataset, sampler=Slow(seed)), asyncio.get_running_loop()
    with suppress(TimeoutError, LimitReached):
        async with asyncio.timeout(stop_s):
            await run.__aenter__()
            for step in range(STEPS):
                await run.step(step)
    before = loop.time()
    await run.pipeline.stop()
    assert loop.time() - before <= end_deadline_s(config)


CHANCES = st.floats(0, 0.15)


@pytest.mark.parametrize("together", [False, True], ids=["make_env", "make_envs"])
@settings(deadline=None, max_examples=30)
@given(
    weather=st.builds(Weather, CHANCES, CHANCES, CHANCES, CHANCES, st.floats(0, 3)),
    seed=st.integers(0, 2**32),
    group_size=st.integers(2, 5),
    policy=st.sampled_from(["drop", "wait"]),
    stop_s=st.floats(0, 200),
)
def test_each_is_closed_once(
    together: bool, weather: Weather, seed: int, group_size: int, policy: str, stop_s: float
) -> None:
    dataset = Stormy(weather, seed, group_size, together)
    virtual_time.run(storm(dataset, seed, policy, stop_s))
    assert dataset.closed == Counter(range(dataset.made)), "by the time that the stop has ended"
