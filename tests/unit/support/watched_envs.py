"""Environments of which each is known by its number, from when it is made until it is closed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from orchestrator_fakes import Problems

from orchestrator.env import Env, EnvGroupBuilder, StepResult, StopCondition

Act = Callable[["Watched", str], Awaitable[None]]
"""What an environment does besides, in one of its methods."""


async def nothing(env: Watched, method: str) -> None:
    """Does nothing besides."""


class Watched(Env):
    """One step; notes when it is used and closed."""

    def __init__(self, dataset: WatchedProblems, problem: int, sample: int) -> None:
        self.dataset, self.problem, self.sample = dataset, problem, sample
        self.number = dataset.created
        self.busy = False
        dataset.created += 1
        dataset.made_for[problem, sample] += 1

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        await self._act("initial_observation")
        return [self.problem, self.sample], ()

    async def step(self, action: Sequence[int]) -> StepResult:
        await self._act("step")
        return StepResult(float(self.sample), True)

    async def close(self) -> None:
        assert not self.busy, "it is closed while one of its methods runs"
        self.dataset.closed[self.number] += 1
        await self.dataset.act(self, "close")
        self.dataset.whole_closes += 1

    async def _act(self, method: str) -> None:
        assert not self.dataset.closed[self.number], f"{method} of a closed environment"
        self.busy = True
        try:
            await self.dataset.act(self, method)
        finally:
            self.busy = False


class WatchedProblem(EnvGroupBuilder):
    def __init__(self, dataset: WatchedProblems, number: int) -> None:
        self.dataset, self.number = dataset, number

    async def make_env(self, sample: int) -> Env:
        return Watched(self.dataset, self.number, sample)

    async def cleanup(self) -> None:
        self.dataset.cleaned[self.number] += 1


class WatchedTogether(WatchedProblem):
    """Makes them together, as datasets did before `make_env`."""

    async def make_envs(self) -> Sequence[Env]:
        return [Watched(self.dataset, self.number, sample) for sample in range(self.dataset.group_size)]


class WatchedProblems(Problems):
    """Problem n is its number; environments are numbered as they are made."""

    def __init__(self, act: Act = nothing, group_size: int = 2, builder: Any = WatchedProblem) -> None:
        super().__init__(group_size=group_size, kind=builder)
        self.act = act
        self.created, self.whole_closes = 0, 0
        self.made_for: Counter[tuple[int, int]] = Counter()
        self.closed: Counter[int] = Counter()
        """Closes that began, by the environment's number."""

    def assert_each_closed_once(self) -> None:
        assert self.created
        assert self.closed == Counter(range(self.created)), f"{self.created} were made"


def at(method: str, act: Callable[[], Awaitable[Any]], **numbers: int) -> Act:
    """Acts in `method` of the environments with these numbers (`problem`, `sample`)."""

    async def run(env: Watched, called: str) -> None:
        if called == method and all(getattr(env, name) == number for name, number in numbers.items()):
            await act()

    return run


async def raises() -> None:
    raise OSError("the tool backend is down")


async def hangs() -> None:
    await asyncio.Event().wait()
