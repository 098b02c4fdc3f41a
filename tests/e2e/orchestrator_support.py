"""A sampler and an environment that the orchestrator's actor can import."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from orchestrator.env import Env, EnvContext, EnvGroupBuilder, RLDataset, StepResult, StopCondition
from trireme.protocols import ReplicaLoad
from trireme.types import SampledSequence, SampleRequest, VersionSpan
from trireme.weights import PublishedWeights, UpdateReport


class SeededSampler:
    """Answers at once with one token that follows from the seed."""

    def __init__(self) -> None:
        self.weights: PublishedWeights | None = None

    async def sample(self, request: SampleRequest) -> SampledSequence:
        assert self.weights is not None, "asked before any weights were there"
        token = (request.params.seed or 0) % 8
        spans = (VersionSpan(self.weights.identity, 0, 1),)
        return SampledSequence(np.asarray([token], np.int32), np.asarray([-2.0], np.float32), "stop", spans)

    async def update_weights(self, weights: PublishedWeights) -> list[UpdateReport]:
        self.weights = weights
        return [UpdateReport(0, weights.identity, 0.0, 10 * weights.identity.version, 0.0)]

    def acknowledged(self) -> dict[int, int]:
        return {} if self.weights is None else {0: self.weights.identity.version}

    async def load(self) -> dict[int, ReplicaLoad]:
        return {0: ReplicaLoad(running=0, waiting=0, kv_used=0.0, preemptions=0)}


class GuessEnv(Env):
    def __init__(self, number: int, broken: bool, hangs: bool) -> None:
        self.number, self.broken, self.hangs = number, broken, hangs

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return [self.number], ()

    async def step(self, action: Sequence[int]) -> StepResult:
        if self.broken:
            raise ZeroDivisionError("the environment is broken")
        if self.hangs:
            await asyncio.Event().wait()
        return StepResult(float(action[0] % 2), episode_done=True)


class GuessBuilder(EnvGroupBuilder):
    def __init__(self, number: int, group_size: int, broken: bool, hangs: bool) -> None:
        self.number, self.group_size, self.broken, self.hangs = number, group_size, broken, hangs

    async def make_envs(self) -> Sequence[Env]:
        return [GuessEnv(self.number, self.broken, self.hangs) for _ in range(self.group_size)]


class Guesses(RLDataset):
    """Eight problems in one batch; `broken`: none of them works; those from `hang_from` on hang."""

    def __init__(self, context: EnvContext, broken: bool = False, hang_from: int = 8) -> None:
        self.context, self.broken, self.hang_from = context, broken, hang_from

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [GuessBuilder(i, self.context.group_size, self.broken, i >= self.hang_from) for i in range(8)]

    def __len__(self) -> int:
        return 1
