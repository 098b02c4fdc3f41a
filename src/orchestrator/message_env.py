"""Environments that speak chat messages. A renderer turns messages into tokens and back.

    MessageEnv  --initial_messages-->  renderer.generation_prompt  -->  tokens
                <------- step -------  renderer.parse_response     <--  sampled tokens
                -- next messages --->  ...

Sampled messages are kept as tokens: while no thinking is removed from the history, the next prompt begins with the last
prompt and exactly the tokens that were sampled after it. So all turns are one training sequence, and only later
messages have to be tokenised.

The names in docs/api.md are stable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from orchestrator.env import (
    Continuation,
    Env,
    EnvGroupBuilder,
    Resumable,
    StepResult,
    StopCondition,
    TokenIds,
    Truncation,
    close_env,
    result_of,
)
from trireme.renderers import Message, Renderer, ToolSpec


@dataclass(frozen=True)
class MessageStep:
    """The environment's result for one message of the assistant."""

    reward: float
    episode_done: bool
    next_messages: Sequence[Message] = ()
    """Messages before the assistant's next turn."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values by name. The run reports for each name the mean over all steps that have a value."""
    logs: Mapping[str, object] = field(default_factory=dict)
    """Values by name that are stored with the rollout, for people to read."""
    in_loss: bool = True
    """False: this message alone is masked out of the loss, for example because it cannot be parsed."""


class MessageEnv(Resumable, ABC):
    """One episode of one problem, as a chat. Each object plays one rollout. The result of `state_dict` does not need to
    contain the messages, because RenderedEnv saves them."""

    tools: Sequence[ToolSpec] = ()
    """Tools that the assistant may call."""

    @abstractmethod
    async def initial_messages(self) -> Sequence[Message]:
        """Returns the messages before the assistant's first one."""

    @abstractmethod
    async def step(self, message: Message) -> MessageStep:
        """Takes the assistant's message; its thinking and tool calls are in fields of their own, not in its content.
        Returns the reward, and the next messages or the end of the episode."""

    async def unreadable(self, message: Message, cut_off: bool) -> MessageStep:
        """Called instead of `step` for a message that `Renderer.parse_response` cannot read. Either the message reached
        the token limit and was cut off (`cut_off` is True), or it is malformed. Unless overridden, ends the episode
        with reward 0."""
        return MessageStep(0.0, True)

    def known_answer(self) -> str | None:
        """Returns a good answer to the newest prompt as text, like `Env.known_answer`. Unless overridden, returns None:
        the environment knows no answer."""
        return None

    async def truncated(self, reason: Truncation) -> MessageStep | None:
        """Called once when a limit of the run ends the episode, like `Env.truncated`. Unless overridden, the rewards do
        not change."""
        return None

    async def close(self) -> None:
        """Releases the environment's resources, like `Env.close`."""
        return


class RenderedEnv(Env):
    """An Env that plays the MessageEnv `env`; `renderer` turns its messages into tokens, and sampled tokens into
    messages. Adds the metric `parse_error`: 1 for a malformed message, else 0. A message that was cut off at the token
    limit does not count as malformed."""

    def __init__(self, env: MessageEnv, renderer: Renderer) -> None:
        self._env = env
        self._renderer = renderer
        self._messages: list[Message] = []
        self._prompt = array("i")
        """The token ids of the last prompt."""

    async def initial_observation(self) -> tuple[TokenIds, StopCondition]:
        self._messages = list(await result_of(self._env.initial_messages))
        return self._whole_prompt(self._messages), self._renderer.stop_condition()

    async def step(self, action: Sequence[int]) -> StepResult:
        message, whole = self._renderer.parse_response(action, self._env.tools)
        cut_off = not self._renderer.finished(action)
        env = self._env
        result = await (result_of(env.step, message) if whole else result_of(env.unreadable, message, cut_off))
        metrics = {"parse_error": float(not whole and not cut_off), **result.metrics}
        if result.episode_done:
            return StepResult(result.reward, True, metrics=metrics, logs=result.logs, in_loss=result.in_loss)
        observation = self._next_prompt({**message, "tokens": array("i", action)}, result.next_messages)
        stop = self._renderer.stop_condition()
        return StepResult(result.reward, False, observation, stop, metrics, result.logs, result.in_loss)

    def known_answer(self) -> str | None:
        return self._env.known_answer()

    async def truncated(self, reason: Truncation) -> StepResult | None:
        last = await result_of(self._env.truncated, reason)
        if last is None:
            return None
        return StepResult(last.reward, True, metrics=last.metrics, logs=last.logs, in_loss=last.in_loss)

    def state_dict(self) -> Mapping[str, object] | None:
        state = self._env.state_dict()
        if state is None:
            return None
        messages = [_with_array(message) for message in self._messages]
        return {"env": state, "messages": messages, "prompt": np.array(self._prompt, np.int32)}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._messages = [_without_array(message) for message in state["messages"]]
        self._prompt = array("i", state["prompt"].tolist())
        await result_of(self._env.load_state_dict, state["env"])

    async def close(self) -> None:
        await close_env(self._env)

    def _next_prompt(self, message: Message, replies: Sequence[Message]) -> TokenIds | Continuation:
        """Returns the prompt after the assistant's `message` and the `replies` to it."""
        before = self._messages
        self._messages = [*self._messages, message, *replies]
        follows = self._renderer.continuation(self._messages, self._env.tools)
        if follows is None:
            return self._whole_prompt([*before, {**message, "prompt": self._prompt.tolist()}, *replies])
        self._prompt.extend([*message["tokens"], *follows])
        return Continuation(follows)

    def _whole_prompt(self, messages: Sequence[Message]) -> TokenIds:
        self._prompt = array("i", self._renderer.generation_prompt(messages, self._env.tools))
        return np.array(self._prompt, np.int32)


def _with_array(message: Message) -> dict[str, object]:
    """Returns a copy of a message for a checkpoint. If the message has sampled tokens, they become an int32 array."""
    return message | ({"tokens": np.array(message["tokens"], np.int32)} if "tokens" in message else {})


def _without_array(values: Mapping[str, Any]) -> Message:
    return cast(
        Message, {**values, **({"tokens": array("i", values["tokens"].tolist())} if "tokens" in values else {})}
    )


@dataclass(frozen=True)
class MessageEnvGroup(EnvGroupBuilder):
    """One problem: `size` chats, each made by `make`, which must be picklable (a class, a `functools.partial`)."""

    make: Callable[[], MessageEnv]
    renderer: Renderer
    size: int

    async def make_env(self, sample: int) -> Env:
        return RenderedEnv(self.make(), self.renderer)

    async def make_envs(self) -> Sequence[Env]:
        return [await self.make_env(sample) for sample in range(self.size)]
