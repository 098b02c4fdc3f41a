"""`User: ...`, `Assistant: ...`: for base models, and for tokenizers without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trireme.errors import BadInput
from trireme.renderers.base import TextRenderer, describe_tools, thinking_block, with_tool_calls
from trireme.renderers.history import HistoryRule
from trireme.renderers.types import Message, ToolSpec

OTHERS = ("User", "System", "Tool")


class RoleColonRenderer(TextRenderer):
    """Messages are parted by an empty line; the assistant's end with the tokenizer's end of sequence, which stops it.

        System: Be brief.\n\nUser: 2 + 2?\n\nAssistant: 4<eos>\n\nUser: 3 + 3?\n\nAssistant:

    Raises BadInput for a tokenizer without an end of sequence.
    """

    def __init__(self, tokenizer: Any, rule: HistoryRule) -> None:
        if tokenizer.eos_token_id is None:
            raise BadInput(
                "renderer.name = role_colon with a tokenizer that has no end-of-sequence token; expected one: it ends "
                "the assistant's message. Set eos_token in its tokenizer_config.json"
            )
        super().__init__(tokenizer, [tokenizer.eos_token_id], rule)
        self._end = tokenizer.eos_token  # transformers makes it up from several places at each access

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], generate: bool) -> str:
        boundary = self.thinking_from(messages, generate)
        said = [self._said(message, i >= boundary) for i, message in enumerate(messages)]
        if tools:
            said.insert(0, f"System: {describe_tools(tools)}")
        return "\n\n".join([*said, "Assistant:"] if generate else said)

    def _said(self, message: Message, shows_thinking: bool) -> str:
        speaker = message["role"].capitalize()
        if speaker != "Assistant":
            return f"{speaker}: {message['content']}"
        thinking = message.get("thinking", "")
        block = thinking_block(thinking) if shows_thinking and thinking else ""
        calls = with_tool_calls(message["content"], message.get("tool_calls", ()))
        return f"{speaker}: {block}{calls}{self._end}"

    def parse_text(self, text: str) -> tuple[Message, bool]:
        """The space after the colon is no part of the message. One in which somebody else speaks too is malformed."""
        message, whole = super().parse_text(text.removeprefix(" "))
        return message, whole and not any(f"\n\n{speaker}:" in text for speaker in OTHERS)
