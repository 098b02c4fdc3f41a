"""A renderer that uses the tokenizer's own chat template: it gives the same tokens as `apply_chat_template`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trireme.core.errors import BadInput
from trireme.core.tokenizer import Tokenizer
from trireme.renderers.conversation import Message, ToolSpec
from trireme.renderers.qwen_tags import CALL, THINK, THINK_END, thinking_block, tool_schema
from trireme.renderers.text_renderer import MARK, TextRenderer

SWITCH = "enable_thinking"
NO_THINKING = re.compile(rf"(?:{THINK}\s*{THINK_END}\s*)?\Z")
"""Matches the empty thinking block, if the template writes one, at the end of a prompt that asks for an answer without
thinking."""
QUESTION: Message = {"role": "user", "content": "?"}
ANSWER: Message = {"role": "assistant", "content": MARK}


class ChatTemplateRenderer(TextRenderer):
    """A renderer that writes conversations with the tokenizer's chat template. An assistant's message ends with the
    special token that the template puts after it, or with the end-of-sequence token.

    Tool calls are parsed if the template writes them as `<tool_call>` blocks, and stay in the content otherwise.
    `enable_thinking` is passed to the template. Raises BadInput if the tokenizer has no template or several, if
    `enable_thinking` is set but the template does not use it, or if there is no token that can end a message.
    """

    def __init__(self, tokenizer: Tokenizer, strip: bool, enable_thinking: bool | None = None) -> None:
        template = tokenizer.chat_template
        if not isinstance(template, str):
            raise BadInput(
                "renderer.name = chat_template with a tokenizer that has "
                f"{'no chat template' if template is None else 'several chat templates'}; expected one: set "
                "--model.tokenizer to a tokenizer with one chat template, or set --renderer.name to role_colon"
            )
        if enable_thinking is not None and SWITCH not in template:
            raise BadInput(
                f"renderer.{SWITCH} = {str(enable_thinking).lower()} with a chat template that ignores this key; "
                f"expected a template that uses it, such as Qwen3's: leave renderer.{SWITCH} out"
            )
        if enable_thinking is None:
            self._options = {}
        else:
            self._options = {SWITCH: enable_thinking}
        self._writes_thinking = "reasoning_content" in template
        self._reads_calls = CALL in template
        super().__init__(tokenizer, (), strip)
        after = self.encode(self.text([QUESTION, ANSWER], (), False).partition(MARK)[2])
        special = set(tokenizer.get_added_vocab().values())
        candidates = [*(token for token in after[:1] if token in special), tokenizer.eos_token_id]
        self._stop = tuple(dict.fromkeys(token for token in candidates if token is not None))
        if not self._stop:
            raise BadInput(
                "renderer.name = chat_template with no token that ends an answer: the tokenizer has no end-of-sequence "
                "token, and the chat template puts no special token after the assistant's message. Set eos_token in "
                "tokenizer_config.json, or choose another tokenizer"
            )
        prompt = self.text([QUESTION], (), True)
        self.thinking_is_open = prompt.rstrip().endswith(THINK)
        if enable_thinking is False:
            self.no_thinking = "".join(NO_THINKING.findall(prompt))

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], generate: bool) -> str:
        if self._writes_thinking:
            boundary = 0
        else:
            boundary = self.thinking_from(messages, generate)
        return str(
            self._tokenizer.apply_chat_template(
                [self._for_template(message, i >= boundary) for i, message in enumerate(messages)],
                tools=[tool_schema(tool) for tool in tools] or None,
                add_generation_prompt=generate,
                tokenize=False,
                **self._options,
            )
        )

    def _for_template(self, message: Message, shows_thinking: bool) -> dict[str, object]:
        """Returns the message as a dictionary with the names that chat templates use. Thinking is put into the content
        if the template has no name for it."""
        shown: dict[str, object] = {key: message[key] for key in ("role", "content", "name") if key in message}
        if shows_thinking:
            thinking = message.get("thinking", "")
        else:
            thinking = ""
        if thinking and self._writes_thinking:
            shown["reasoning_content"] = thinking
        elif thinking:
            shown["content"] = thinking_block(thinking) + message["content"]
        calls = message.get("tool_calls")
        if calls:
            shown["tool_calls"] = [{"type": "function", "function": dict(call)} for call in calls]
        return shown

    def parse_text(self, text: str) -> tuple[Message, bool]:
        if self._reads_calls or CALL not in text:
            return super().parse_text(text)
        return {"role": "assistant", "content": text}, True


RENDERER = ChatTemplateRenderer
