"""Episodes of several turns, and a sampler that answers each turn when it is let."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from orchestrator_fakes import FakeSampler

from orchestrator.env import Continuation, Env, EnvGroupBuilder, RLDataset, StepResult, StopCondition
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity

TURNS = 4


class Talk(Env):
    """An episode of TURNS turns, whose prompts say how many there were and what was answered."""

    def __init__(self, dataset: Talks, number: int, sample: int) -> None:
        self.dataset, self.number, self.sample = dataset, number, sample
        self.heard: list[int] = []

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        self.dataset.begun[self.number, self.sample] += 1
        return [self.number, self.sample], ()

    async def step(self, action: Sequence[int]) -> StepResult:
        for _ in range(self.dataset.rng.choice([0, 0, 3])):
            await asyncio.sleep(0)
        self.heard += action
        self.dataset.turns[self.number, self.sample, len(self.heard)] += 1
        done = len(self.heard) == TURNS
        if self.dataset.breaks and len(self.heard) == 2:  # a prompt that does not begin with what was before
            return StepResult(1.0, done, [self.number, 7, *self.heard])
        return StepResult(float(self.sample), done, Continuation([9, len(self.heard)]))

    def state_dict(self) -> Mapping[str, Any] | None:
        assert self.dataset.keeps, "of another environment nothing is asked"
        return {"heard": np.array(self.heard, np.int32), "last": self.heard[-1]}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.heard = state["heard"].tolist()
        assert self.heard[-1] == state["last"]


class Silent(Talk):
    """Says nothing of its state."""

    def state_dict(self) -> None:
        return None


class TalkProblem(EnvGroupBuilder):
    def __init__(self, dataset: Talks, number: int) -> None:
        self.dataset, self.number = dataset, number

    async def make_env(self, sample: int) -> Env:
        return (Talk if self.dataset.keeps else Silent)(self.dataset, self.number, sample)


class Talks(RLDataset):
    def __init__(self, keeps: bool = True, breaks: bool = False, seed: int = 0) -> None:
        self.keeps, self.breaks, self.rng = keeps, breaks, random.Random(seed)
        self.begun: Counter[tuple[int, int]] = Counter()
        self.turns: Counter[tuple[int, int, int]] = Counter()

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [TalkProblem(self, 3 * index + i) for i in range(3)]

    def __len__(self) -> int:
        return 30


class Slow(FakeSampler):
    """Answers a turn of a rollout only when it is let: {(problem, sample, turn): event}. Its tokens are all 5."""

    def __init__(self, rng: random.Random | None = None) -> None:
        super().__init__()
        self.rng = rng
        self.turns: Counter[tuple[int, int]] = Counter()
        self.gates: dict[tuple[int, int, int], asyncio.Event] = {}

    def gate(self, problem: int, sample: int, turn: int) -> asyncio.Event:
        return self.gates.setdefault((problem, sample, turn), asyncio.Event())

    async def sample(self, request: SampleRequest) -> SampledSequence:
        self.requests.append(request)
        problem, sample, _, turn = request.request_id.split("/")
        number = 3 * int(problem.split(".")[1]) + int(problem.split(".")[2])
        self.turns[number, int(turn)] += 1
        if event := self.gates.get((number, int(sample), int(turn))):
            await event.wait()
        for _ in range(self.rng.choice([0, 1, 5, 40]) if self.rng else 0):
            await asyncio.sleep(0)
        span = VersionSpan(WeightIdentity(0, self.version, f"d{self.version}"), 0, 1)
        return SampledSequence(np.full(1, 5, np.int32), np.full(1, -1.0, np.float32), "stop", (span,))
