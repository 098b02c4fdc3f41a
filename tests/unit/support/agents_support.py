"""Agents that play rollouts: a port for them, and a sampler that says its texts and keeps what it said."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from config_support import small
from renderer_support import QWEN3, bpe
from service_support import ScriptedSampler

import orchestrator.agents
import service.agents
from orchestrator.advantages import WeightedTrajectory, lay_out
from orchestrator.agents import agent_sessions, play_session
from orchestrator.env import AgentEnv, Trajectory
from orchestrator.rollout import RolloutKey, RolloutLimits
from service.agents import LoopbackSessions
from service.requests import ServedModels
from trireme.config.inference import SamplingConfig
from trireme.core.agents import AgentAccess
from trireme.core.sampler import OnProgress
from trireme.core.types import SampledSequence, SampleRequest

KEY = RolloutKey("agent", "0.1.2", sample=3, attempt=0, route_key="0.1.2/0")
SAMPLING = SamplingConfig(max_tokens=300, temperature=0.7)
MAX_LEN = 2000
Play = Callable[[openai.AsyncOpenAI], Awaitable[Any]]


class Plays(AgentEnv):
    """An agent that is a function of its client."""

    def __init__(self, function: Play) -> None:
        self.function = function

    async def play(self, access: AgentAccess) -> tuple[float, Mapping[str, float]]:
        self.access = access
        async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as client:
            played: tuple[float, Mapping[str, float]] = await self.function(client)
            return played


class Rollout:
    """A port for agents, and a sampler that says its texts and keeps what it said."""

    def __init__(self, sampler: ScriptedSampler, limits: RolloutLimits) -> None:
        self.sampler, self.limits = sampler, limits
        self.record: list[SampledSequence] = []
        self.pairs: list[tuple[Any, SampleRequest]] = []
        """The tokens of each answer, and its request."""

    async def sample(self, request: SampleRequest, *on_progress: OnProgress) -> SampledSequence:
        answer = await self.sampler.sample(request, *on_progress)
        self.record.append(answer)
        self.pairs.append((answer.tokens, request))
        return answer

    async def play(self, function: Play) -> Trajectory:
        return await self.play_env(Plays(function))

    async def play_env(self, env: AgentEnv) -> Trajectory:
        return await play_session(env, self.sample, KEY, self.limits, SAMPLING, 5)

    @property
    def sampled(self) -> list[int]:
        return [token for answer in self.record for token in answer.tokens.tolist()]


@asynccontextmanager
async def rollout(*texts: str | Exception) -> AsyncIterator[Rollout]:
    tokenizer = bpe(QWEN3)
    config = small(
        model={"max_seq_len": MAX_LEN},
        orchestrator={"batch_size": 2, "group_size": 2},
        env={"id": "agent:calculator:play"},
        inference={"sampling": {"max_tokens": 300}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.agents, "load_tokenizer", lambda name: tokenizer)
        models = ServedModels(("policy",), MAX_LEN, len(tokenizer))
        async with agent_sessions(lambda: LoopbackSessions(config, models)):
            limits = RolloutLimits(len(tokenizer), MAX_LEN, decode=tokenizer.decode)
            yield Rollout(ScriptedSampler(*texts, tokenizer=tokenizer), limits)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def ask(client: openai.AsyncOpenAI, *messages: Any, **body: Any) -> Any:
    answer = await client.chat.completions.create(model="policy", messages=list(messages), **body)
    replies = [{"role": "assistant", "content": choice.message.content} for choice in answer.choices]
    return replies if "n" in body else replies[0]


def trained(trajectory: Trajectory) -> list[int]:
    batch = lay_out([WeightedTrajectory(trajectory, 1.0, 0.7)])
    tokens: list[int] = batch.columns["target_tokens"][batch.columns["mask"] > 0].tolist()
    return tokens


def open_sessions() -> int:
    sessions: Any = orchestrator.agents._current
    return len(sessions._registry.book.sessions) + len(sessions._sampler.rollouts)
