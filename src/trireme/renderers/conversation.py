"""Conversations, and the interface of a renderer.

A renderer stands between chat messages and tokens. Text that was sampled is never tokenised again: a message that
`parse_response` made carries its `tokens`, and wherever it appears in a later prompt these very tokens are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Required, TypedDict

import numpy as np
import numpy.typing as npt

TrainOn = Literal[
    "last_assistant_message", "all_assistant_messages", "all_user_and_system_messages", "all_messages", "all_tokens"
]
"""The messages of a conversation that are trained on. In such a message the text and the token that ends it have weight
1; the header (who speaks) and all other messages have weight 0. With `all_tokens` every token has weight 1."""


class ToolCall(TypedDict):
    """A model's call of a tool."""

    name: str
    arguments: dict[str, object]  # JSON values


class ToolSpec(TypedDict):
    """A tool that a model may call."""

    name: str
    description: str
    parameters: dict[str, object]  # the JSON schema of its arguments, an object


class Message(TypedDict, total=False):
    """One message of a conversation."""

    role: Required[str]  # system, user, assistant or tool
    content: Required[str]  # the text without the thinking and the tool calls
    thinking: str
    tool_calls: list[ToolCall]
    name: str  # the tool that a message of role tool comes from
    tokens: Sequence[int]  # the message was sampled as these, with what ended it
    prompt: Sequence[int]  # the prompt that it was sampled from, if that is known


class Renderer(ABC):
    """Converts between messages and the tokens of one model. The default methods suit a format in which a single token
    ends a message."""

    @abstractmethod
    def generation_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Returns the tokens of the prompt for the assistant's next message."""

    def continuation(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int] | None:
        """Returns the end of the prompt for the assistant's next message: the tokens after the last sampled message.
        The whole next prompt is: the prompt of the last sampled message, the tokens of this message, then the result.
        The last sampled message may lack the key `prompt`, because this method does not need it.

        Returns None if the next prompt might not begin with the earlier prompt and the sampled tokens, for example
        because the renderer strips earlier thinking. Also returns None if the renderer can only make whole prompts.
        This default always returns None.
        """
        return None

    @abstractmethod
    def supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn, tools: Sequence[ToolSpec] = ()
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Returns the whole conversation as tokens int32 [T], and a weight for each token, float32 [T], 0 or 1. If an
        assistant's message is trained on, the tokens in front of it equal its generation prompt.

        Raises ValueError if the conversation has none of the messages that `train_on` names.
        """

    @abstractmethod
    def stop_tokens(self) -> tuple[int, ...]:
        """Returns the ids of the stop tokens. Any one of these tokens ends an assistant's message."""

    def stop_condition(self) -> tuple[int | str, ...]:
        """Returns everything that ends an assistant's message: the ids of stop tokens, and stop strings."""
        return self.stop_tokens()

    def finished(self, tokens: Sequence[int]) -> bool:
        """Returns True if a stop token or string ended the message sampled as `tokens`, False if it was cut off."""
        return len(tokens) > 0 and tokens[-1] in self.stop_tokens()

    def closed(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens of a sampled message, ended in the way in which the renderer itself ends messages. If a
        stop string ended the message, the renderer's end token replaces this string."""
        return list(tokens)

    @abstractmethod
    def parse_response(self, tokens: Sequence[int], tools: Sequence[ToolSpec] = ()) -> tuple[Message, bool]:
        """Parses sampled `tokens`, including the stop token or string at their end. Returns the assistant's message,
        and True if it is whole, False if it was cut off or is malformed (thinking or a tool call without an end, a call
        that is not JSON). Never raises.

        `tools`: their schemas give the types of arguments where a format writes arguments as plain text.
        """
