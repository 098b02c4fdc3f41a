"""A sampler and an environment that the orchestrator's actor can import."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from orchestrator.env import Env, EnvContext, EnvGroupBuilder, RLDataset, StepResult, StopCondition
from orchestrator.handle import OrchestratorHandle
from trireme.core.sampler import OnVersions, ReplicaStats
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity
from trireme.core.weights import Drift, UpdateReport


def _identity(version: int) -> WeightIdentity:
    return WeightIdentity(0, version, f"d{version}")


def update(handle: OrchestratorHandle, version: int, on_tick: Callable[[], None] = lambda: None) -> None:
    """Begins a version as a driver does, with the report of one replica."""
    handle.end_version(on_tick)
    handle.begin_version(_identity(version), on_tick)


class NamedSampler:
    """Answers at once with one token that follows from the request's name."""

    def __init__(self, on_versions: OnVersions, first: int = 0) -> None:
        """`first`: the version that it begins with."""
        self.changed = on_versions
        self.version = first - 1

    async def sample(self, request: SampleRequest) -> SampledSequence:
        assert self.version >= 0, "asked before any weights were there"
        token = hashlib.blake2b(request.request_id.encode(), digest_size=1).digest()[0] % 8
        spans = (VersionSpan(_identity(self.version), 0, 1),)
        return SampledSequence(np.asarray([token], np.int32), np.asarray([-2.0], np.float32), "stop", spans)

    async def updated(self, identity: WeightIdentity) -> list[UpdateReport]:
        self.version = identity.version
        self.changed({0: self.version})
        return [UpdateReport(0, identity, Drift(0.0, 0.0), 10 * self.version, 0.0)]

    async def stats(self) -> dict[int, ReplicaStats]:
        return {0: ReplicaStats(running=0, waiting=0, kv_used=0.0, preemptions=0)}


class GuessEnv(Env):
    def __init__(self, number: int, hangs: bool) -> None:
        self.number, self.hangs = number, hangs

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return [self.number], ()

    async def step(self, action: Sequence[int]) -> StepResult:
        if self.hangs:
            await asyncio.Event().wait()
        return StepResult(float(action[0] % 2), episode_done=True)


class GuessBuilder(EnvGroupBuilder):
    def __init__(self, number: int, group_size: int, hangs: bool) -> None:
        self.number, self.group_size, self.hangs = number, group_size, hangs

    async def make_env(self, sample: int) -> Env:
        return GuessEnv(self.number, self.hangs)


class Guesses(RLDataset):
    """Eight problems in one batch; those from `hang_from` on hang."""

    def __init__(self, context: EnvContext, hang_from: int = 8) -> None:
        self.context, self.hang_from = context, hang_from

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [GuessBuilder(i, self.context.group_size, i >= self.hang_from) for i in range(8)]

    def __len__(self) -> int:
        return 1
