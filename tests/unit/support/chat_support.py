"""Chats of a scripted policy with message environments."""

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from renderer_support import QWEN3, bpe, message_of, scattered

from orchestrator.env import Env, Trajectory, Truncation
from orchestrator.message_env import MessageEnv, MessageStep, RenderedEnv
from orchestrator.rollout import RolloutKey, RolloutLimits, run_rollout
from trireme.config.schema import SamplingConfig
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity
from trireme.renderers import Message, Renderer, make_renderer

LIMITS = RolloutLimits(1000, 100_000)


class Questions(MessageEnv):
    """Asks `turns` times, and remembers what it heard."""

    def __init__(self, turns: int, role: str = "user", forgiving: bool = False) -> None:
        self.turns, self.role, self.forgiving = turns, role, forgiving
        self.heard: list[Message] = []
        self.unread: list[bool] = []

    async def initial_messages(self) -> Sequence[Message]:
        return [message_of("system", "Answer."), message_of("user", "Question 0?")]

    async def step(self, message: Message) -> MessageStep:
        self.heard.append(message)
        finished = len(self.heard) == self.turns
        questions = [message_of(self.role, f"Question {len(self.heard)}?")]
        return MessageStep(
            1.0, finished, () if finished else questions, metrics={"heard": 1.0}, logs={"said": message["content"]}
        )

    async def truncated(self, reason: Truncation) -> MessageStep | None:
        return MessageStep(-1.0, True, metrics={"full": 1.0}, logs={"reason": reason}, in_loss=False)

    async def unreadable(self, message: Message, cut_off: bool) -> MessageStep:
        self.unread.append(cut_off)
        return await (self.step if self.forgiving else super().unreadable)(
            *[message, cut_off][: 1 + (not self.forgiving)]
        )


class Policy:
    """Answers with what it is given, one after the other; each token has a logprob and a version of its own."""

    def __init__(self, answers: Sequence[Sequence[int]], stop_reason: Any = "stop") -> None:
        self.answers, self.stop_reason = list(answers), stop_reason
        self.requests: list[SampleRequest] = []
        self.tokens = 0

    async def sample(self, request: SampleRequest) -> SampledSequence:
        tokens = self.answers[len(self.requests)]
        self.requests.append(request)
        first, self.tokens = self.tokens, self.tokens + len(tokens)
        spans = tuple(VersionSpan(WeightIdentity(0, first + i, "d"), i, i + 1) for i in range(len(tokens)))
        logprobs = -1.0 - np.arange(first, self.tokens, dtype=np.float32)
        return SampledSequence(np.asarray(tokens, np.int32), logprobs, self.stop_reason, spans)


async def rollout(env: Env, policy: Policy, limits: RolloutLimits = LIMITS) -> Trajectory:
    key = RolloutKey("chat", "0.0.0", 0, 0, "0")
    return await run_rollout(env, policy.sample, key, limits, SamplingConfig(max_tokens=1000), 0)


def play(
    env: MessageEnv, renderer: Renderer, policy: Policy, vocab_size: int = 1000, max_seq_len: int = 100_000
) -> Trajectory:
    limits = RolloutLimits(vocab_size, max_seq_len, decode=bpe().decode)
    return asyncio.run(rollout(RenderedEnv(env, renderer), policy, limits))


@cache
def renderer(name: str = "qwen3", template: str | None = QWEN3, **options: Any) -> Renderer:
    return make_renderer(name, bpe(template), **options)


def encoded_answer(text: str, chat_renderer: Renderer, seed: int = 0) -> list[int]:
    return [*scattered(bpe(), text, seed), chat_renderer.stop_tokens()[0]]
