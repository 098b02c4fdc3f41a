"""Games whose outcome depends on nothing but their tokens."""

import asyncio
import random
import zlib
from collections.abc import Sequence
from typing import Any

from orchestrator_fakes import FakeSampler, Problem, Problems, Run, small_config

from orchestrator.env import Env, StepResult, StopCondition, Trajectory
from trireme.config import Config
from trireme.core.types import SampledSequence, SampleRequest


class Jitter:
    """Takes a random number of turns of the event loop."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def __call__(self) -> None:
        for _ in range(self._random.choice([0, 0, 1, 2, 5, 40])):
            await asyncio.sleep(0)


class Engine(FakeSampler):
    """Answers in random order. As in a real engine an answer depends on what else is computed at the same time."""

    def __init__(self, jitter: Jitter) -> None:
        super().__init__()
        self.jitter = jitter
        self.waves: list[list[str]] = []
        self.in_flight = 0

    async def sample(self, request: SampleRequest) -> SampledSequence:
        if not self.in_flight:
            self.waves.append([])
        wave = self.waves[-1]
        wave.append(request.request_id)
        self.in_flight += 1
        await asyncio.sleep(0)
        company = zlib.crc32(" ".join(wave).encode()) % 1000
        await self.jitter()
        sampled = await super().sample(request)
        self.in_flight -= 1
        return SampledSequence(sampled.tokens, sampled.logprobs - company / 1000, "stop", sampled.spans)


class Game(Env):
    """One to three turns; now and then it raises: once, or every time."""

    def __init__(self, problem: Problem, sample: int, jitter: Jitter) -> None:
        self.problem, self.sample, self.jitter = problem, sample, jitter
        self.turns = 1 + (problem.number + sample) % 3

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        await self.jitter()
        return [self.problem.number, self.sample], ()

    async def step(self, action: Sequence[int]) -> StepResult:
        await self.jitter()
        number, tries = self.problem.number, self.problem.dataset.tries
        self.turns -= 1
        if self.turns:
            return StepResult(0.1, False, next_observation=[number, *action, self.turns])
        tries[number, self.sample] += 1
        if (number, self.sample) == (4, 0) and tries[4, 0] == 1:
            raise KeyError("once")
        if number % 7 == 3 and self.sample:
            raise ZeroDivisionError("every time")
        return StepResult(0.7 / (1 + self.sample), True, metrics={"asked": 0.1 * number})


class Games(Problems):
    def __init__(self, jitter: Jitter) -> None:
        super().__init__(kind=GameProblem)
        self.jitter = jitter


class GameProblem(Problem):
    """Every fourth has equal rewards; after every fifth cleaning up fails."""

    dataset: Games

    async def make_env(self, sample: int) -> Env:
        await self.dataset.jitter()
        return Game(self, sample, self.dataset.jitter)

    async def compute_group_rewards(self, trajectories_G: Sequence[Trajectory]) -> list[tuple[float, dict[str, float]]]:
        await self.dataset.jitter()
        return [(0.3 - t.reward * (self.number % 4 == 1), {"shared": 0.1}) for t in trajectories_G]

    async def cleanup(self) -> None:
        await self.dataset.jitter()
        if self.number % 5 == 0:
            raise OSError("in use")


class GameRun(Run):
    def __init__(self, config: Config, seed: int, start: int = 0, held_out: Sequence[type[Games]] = ()) -> None:
        self.jitter = Jitter(seed)
        held_out_games = [kind(self.jitter) for kind in held_out]
        super().__init__(config, Games(self.jitter), sampler=Engine(self.jitter), start=start, held_out=held_out_games)

    async def train(self) -> None:
        await self.jitter()


def game_config(minibatches: int = 1, max_failure_rate: float = 1.0) -> Config:
    options = {"max_steps_off_policy": 0, "retries": 1, "max_failure_rate": max_failure_rate}
    return small_config(
        4, 5, minibatches=minibatches, deterministic=True, remove_constant_reward_groups=True, **options
    )


def outcome(run: Run) -> list[Any]:
    rows = [{name: value for name, value in row.items() if not name.startswith(("perf/", "time/"))} for row in run.rows]
    batches = [
        [(m.batch.tokens.tolist(), {n: c.tolist() for n, c in m.batch.columns.items()}) for m in batch]
        for batch in run.batches
    ]
    return list(zip(rows, batches, [released.trained for released in run.released], strict=True))


def waves(run: Run) -> list[list[str]]:
    assert isinstance(run.sampler, Engine)
    return run.sampler.waves
