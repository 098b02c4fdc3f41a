"""The renderer that writes `User: ...`, `Assistant: ...`; for base models and tokenizers without a chat template."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from trireme.core.errors import BadInput
from trireme.core.stop_strings import first_of
from trireme.core.tokenizer import Tokenizer
from trireme.renderers.conversation import Message, ToolSpec
from trireme.renderers.qwen_tags import describe_tools, thinking_block, with_tool_calls
from trireme.renderers.text_renderer import TextRenderer

OTHER_SPEAKERS = ("User", "System", "Tool")


class RoleColonRenderer(TextRenderer):
    r"""Renders conversations for base models: each message as `Speaker: text`, with an empty line before the next one.
    The end-of-sequence token ends an answer of the assistant:

        System: Be brief.\n\nUser: 2 + 2?\n\nAssistant: 4<eos>\n\nUser: 3 + 3?\n\nAssistant:

    A base model seldom samples the end-of-sequence token. More often it begins the next speaker's message, for example
    with `\n\nUser:`. Therefore these beginnings are stop strings. When an answer ends with a stop string, the next
    message decides what the next prompt contains after the answer. If this message is from the speaker in the stop
    string, the prompt contains the sampled tokens of the stop string; otherwise, the end-of-sequence token.

    Raises BadInput if the tokenizer has no end-of-sequence token, or if `enable_thinking` is given.
    """

    stop_strings = tuple(f"\n\n{speaker}:" for speaker in OTHER_SPEAKERS)

    def __init__(self, tokenizer: Tokenizer, strip: bool, enable_thinking: bool | None = None) -> None:
        if enable_thinking is not None:
            raise BadInput(
                f"renderer.enable_thinking = {str(enable_thinking).lower()} with role_colon, which has no switch for "
                "thinking: leave renderer.enable_thinking out, or use a model whose chat template has the switch, such "
                "as Qwen3's"
            )
        if tokenizer.eos_token_id is None:
            raise BadInput(
                "renderer.name = role_colon with a tokenizer that has no end-of-sequence token; expected one: it ends "
                "the assistant's message. Set eos_token in its tokenizer_config.json"
            )
        super().__init__(tokenizer, [tokenizer.eos_token_id], strip)
        self._end = tokenizer.eos_token  # transformers computes it at each access

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], generate: bool) -> str:
        boundary = self.thinking_from(messages, generate)
        parts = [self._message_text(message, i >= boundary) for i, message in enumerate(messages)]
        if tools:
            parts.insert(0, f"System: {describe_tools(tools)}")
        return "\n\n".join([*parts, "Assistant:"] if generate else parts)

    def _message_text(self, message: Message, shows_thinking: bool) -> str:
        speaker = message["role"].capitalize()
        if speaker != "Assistant":
            return f"{speaker}: {message['content']}"
        thinking = message.get("thinking", "")
        if shows_thinking and thinking:
            block = thinking_block(thinking)
        else:
            block = ""
        calls = with_tool_calls(message["content"], message.get("tool_calls", ()))
        return f"{speaker}: {block}{calls}{self._end}"

    def _followed_by(self, sampled: list[int], after: str) -> list[int]:
        begun = self._next_speaker(sampled)
        rest = after.removeprefix(self._end)
        if begun and rest.startswith(begun):
            return sampled + self.encode(rest.removeprefix(begun))
        return super()._followed_by(self.closed(sampled), after)

    def _next_speaker(self, sampled: list[int]) -> str:
        r"""Returns the stop string that ended a sampled message, such as `\n\nUser:`, with any text after it. Returns
        "" if no stop string ended the message."""
        text = str(self._tokenizer.decode(sampled))
        place = first_of(self.stop_strings, text)
        if place is None:
            return ""
        return text[place:]

    def closed(self, tokens: Sequence[int]) -> list[int]:
        """See `Renderer`. Replaces the stop string at the end of the message with the end-of-sequence token. A token
        that holds both the end of the message and the beginning of the stop string stays whole, since splitting it
        would tokenise sampled text again."""
        sampled = list(tokens)
        begun = self._next_speaker(sampled)
        if not begun:
            return sampled
        length = len(self._tokenizer.decode(sampled)) - len(begun)
        cut = bisect_left(range(len(sampled)), length, key=lambda n: len(self._tokenizer.decode(sampled[:n])))
        return [*sampled[:cut], self._tokenizer.eos_token_id]

    def parse_text(self, text: str) -> tuple[Message, bool]:
        """See `TextRenderer`. The space after the colon is not part of the message."""
        return super().parse_text(text.removeprefix(" "))


RENDERER = RoleColonRenderer
