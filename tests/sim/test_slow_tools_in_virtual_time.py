"""Tools that take seconds to minutes: all wait together, and others decode meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
import virtual_time
from orchestrator_fakes import FakeSampler, Run, small_config, whole_run

from orchestrator.env import Env, EnvGroup, EnvGroupBuilder, RLDataset, StepResult, StopCondition
from orchestrator.rollout import RolloutLimits
from trireme.config import Config
from trireme.core.sampler import ReplicaStats
from trireme.core.types import SampledSequence, SampleRequest

PLACES = 8
PROMPT = 20
ANSWER_S = 1.0
SHORTEST_S, LONGEST_S = 5.0, 65.0


class UsesTools(Env):
    """Calls a tool `turns` times; the prompt of each turn has a token for each of PROMPT, of the answers and of the
    tools' answers before."""

    def __init__(self, tools: Tools, seconds: Sequence[float]) -> None:
        self._tools, self._seconds = tools, list(seconds)
        self._prompt = [1] * PROMPT

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return list(self._prompt), ()

    async def step(self, action: Sequence[int]) -> StepResult:
        if not self._seconds:
            return StepResult(1.0, True)
        self._prompt += [*action, 2]
        self._tools.running += 1
        self._tools.most = max(self._tools.most, self._tools.running)
        await asyncio.sleep(self._seconds.pop())
        self._tools.running -= 1
        return StepResult(0.0, False, list(self._prompt))


class Tools(RLDataset):
    """Problems with two rollouts each; how many of their tools run, and the most that ever did."""

    def __init__(self, turns: int, problems: int) -> None:
        self._random, self._turns, self._problems = random.Random(0), turns, problems
        self.running = self.most = 0

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [EnvGroup(self._make, 2)]

    def _make(self) -> Env:
        return UsesTools(self, [self._random.uniform(SHORTEST_S, LONGEST_S) for _ in range(self._turns)])

    def __len__(self) -> int:
        return self._problems


class OneReplica(FakeSampler):
    def __init__(self, kv_tokens: int) -> None:
        super().__init__()
        self._kv_tokens, self._running = kv_tokens, 0

    async def sample(self, request: SampleRequest) -> SampledSequence:
        self._running += 1
        await asyncio.sleep(ANSWER_S)
        self._running -= 1
        return await super().sample(request)

    async def stats(self) -> dict[int, ReplicaStats]:
        used = self._running * PROMPT / self._kv_tokens
        queue = max(self._running - PLACES, 0)
        return {0: ReplicaStats(self._running, queue, used, 0, PLACES)}


def slow_config(batch_size: int, max_steps: int, **options: object) -> Config:
    config = small_config(
        batch_size, max_steps, timeout_s=80_000, generation_timeout_s=7200, stale_policy="wait", **options
    )
    return config.model_copy(update={"inference": config.inference.model_copy(update={"max_num_seqs": PLACES})})


def played(config: Config, tools: Tools, kv_tokens: int) -> tuple[int, float]:
    """Returns the most tools that ran at the same time, and the seconds that the run took."""

    async def timed() -> float:
        await whole_run(Run(config, tools, RolloutLimits(1000, 1000), OneReplica(kv_tokens)))
        return asyncio.get_running_loop().time()

    took_s = virtual_time.run(timed())
    return tools.most, took_s


def test_thousands_of_tools_run_at_the_same_time() -> None:
    """5,000 rollouts, each with a tool of up to LONGEST_S, take little longer than one."""
    config = slow_config(1250, 2, max_concurrent=5000)
    most, took_s = played(config, Tools(turns=1, problems=2500), 1_000_000)
    assert most == 5000
    assert took_s < LONGEST_S + 10 * ANSWER_S


def test_others_decode_while_tools_run() -> None:
    """The limit grows, as the replica has nothing to do: the run takes little longer than one without a limit."""
    times = []
    for options in ({}, {"max_concurrent": 5000}):
        most, took_s = played(slow_config(16, 4, **options), Tools(turns=3, problems=64), 100_000)
        assert most == 64, "all that the ledger dispatches"
        times.append(took_s)
    assert times[0] < 1.1 * times[1]


@pytest.mark.parametrize("kv_tokens", [100_000, 800])
def test_a_number_that_was_given_is_the_most_in_flight(kv_tokens: int) -> None:
    most, _ = played(slow_config(16, 2, max_concurrent=12), Tools(turns=2, problems=64), kv_tokens)
    assert most <= 12
