"""What a conversation is, and what a renderer does with it.

A renderer stands between chat messages and tokens. Text that was sampled is never tokenised again: a message that
`parse_response` made carries its `tokens`, and wherever it appears in a prompt later these very tokens are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, Required, TypedDict

import numpy as np
import numpy.typing as npt

TrainOn = Literal[
    "last_assistant_message", "all_assistant_messages", "all_user_and_system_messages", "all_messages", "all_tokens"
]
"""Which tokens of a conversation have weight 1. A message's text and the token that ends it count, its header (who
speaks) does not; `all_tokens` has no exception."""


class ToolCall(TypedDict):
    """A model's call of a tool; `arguments` as in JSON."""

    name: str
    arguments: dict[str, Any]


class ToolSpec(TypedDict):
    """A tool that a model may call; `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str
    parameters: dict[str, Any]


class Message(TypedDict, total=False):
    """One message. `role`: system, user, assistant or tool. `content` is without the thinking and the tool calls, which
    stand beside it. `name` is the tool that a message of role tool comes from. `tokens`: the message was sampled as
    these, with what ended it; `prompt`: from this prompt, if that is known."""

    role: Required[str]
    content: Required[str]
    thinking: str
    tool_calls: list[ToolCall]
    name: str
    tokens: list[int]
    prompt: list[int]


class Renderer(Protocol):
    """Between messages and the tokens of one model."""

    def generation_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """The prompt for the assistant's next message."""
        ...

    def supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn, tools: Sequence[ToolSpec] = ()
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """The whole conversation as tokens int32 [T] and their weights float32 [T], 0 or 1; `weights[t]` belongs to
        `tokens[t]`. Up to the assistant's message the tokens are those of its generation prompt.

        Raises ValueError where `train_on` names messages that the conversation does not have.
        """
        ...

    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids each of which ends the assistant's message."""
        ...

    def stop_condition(self) -> tuple[int | str, ...]:
        """All that ends the assistant's message: these tokens, and strings, each wherever it comes to stand in it."""
        ...

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether one of these ended the message that was sampled as `tokens`; else it was cut off."""
        ...

    def closed(self, tokens: Sequence[int]) -> list[int]:
        """The tokens of a sampled message as the renderer itself would end it: by a token, where a string ended it."""
        ...

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, bool]:
        """The assistant's message that was sampled as `tokens`, with what ended it. False: it was cut off, or is
        malformed (thinking or a tool call without an end, a call that is no JSON). Never raises."""
        ...
