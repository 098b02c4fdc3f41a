"""Qwen3's format. With thinking stripped from the history, it writes the same text as Qwen3's own chat template."""

from __future__ import annotations

from collections.abc import Sequence

from trireme.core.errors import BadInput
from trireme.core.tokenizer import Tokenizer
from trireme.renderers.conversation import Message, ToolSpec
from trireme.renderers.history import last_query
from trireme.renderers.qwen_tags import (
    THINK,
    THINK_END,
    TOOL_RESPONSE,
    TOOL_RESPONSE_END,
    describe_tools,
    thinking_block,
    with_tool_calls,
)
from trireme.renderers.text_renderer import TextRenderer

START = "<|im_start|>"
END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"


class Qwen3Renderer(TextRenderer):
    """A renderer that writes Qwen3's format. Raises BadInput for a tokenizer without the tokens `<|im_start|>` and
    `<|im_end|>`."""

    def __init__(self, tokenizer: Tokenizer, strip: bool, enable_thinking: bool | None = None) -> None:
        vocabulary = tokenizer.get_added_vocab()
        missing = [token for token in (START, END) if token not in vocabulary]
        if missing:
            raise BadInput(
                f"renderer.name = qwen3 with a tokenizer that has no token {' and no '.join(missing)}; expected the "
                "tokenizer of a Qwen3 model: set --renderer.name to chat_template or role_colon, or leave it out"
            )
        ends = [
            vocabulary[END],
            tokenizer.eos_token_id,
            vocabulary.get(END_OF_TEXT),
        ]  # these models also stop at the last one
        super().__init__(tokenizer, [end for end in ends if end is not None], strip)
        if enable_thinking is False:
            self.no_thinking = thinking_block("")
        else:
            self.no_thinking = ""

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], generate: bool) -> str:
        boundary = self.thinking_from(messages, generate)
        query = last_query(messages)
        blocks = [_opening(messages, tools)] if messages else []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                blocks.append(_assistant(message, i >= boundary, i == len(messages) - 1 > query))
            elif message["role"] == "tool":
                blocks.append(_tool(messages, i))
            elif i or message["role"] != "system":
                blocks.append(f"{START}{message['role']}\n{message['content']}{END}\n")
        return "".join(blocks) + (f"{START}assistant\n{self.no_thinking}" if generate else "")


def _opening(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
    """Returns the text of the system message, which also lists the tools; "" if the conversation has neither a system
    message nor tools."""
    if messages[0]["role"] == "system":
        parts = [messages[0]["content"]]
    else:
        parts = []
    parts += [describe_tools(tools)] if tools else []
    if parts:
        return f"{START}system\n" + "\n\n".join(parts) + f"{END}\n"
    return ""


def _assistant(message: Message, shows_thinking: bool, answers_last: bool) -> str:
    """Returns the text of an assistant's message. `shows_thinking`: True writes the message's thinking. `answers_last`:
    True if the message is the conversation's last one and follows the last question. If both are True, the text has a
    thinking block even if the message has no thinking."""
    content = message["content"]
    thinking = message.get("thinking", "")
    if "thinking" not in message and THINK_END in content:  # separated as the template does
        thinking = content.split(THINK_END)[0].rstrip("\n").split(THINK)[-1].lstrip("\n")
        content = content.split(THINK_END)[-1].lstrip("\n")
    if shows_thinking and (thinking or answers_last):
        block = thinking_block(thinking)
    else:
        block = ""
    body = content.lstrip("\n") if block else content
    return f"{START}assistant\n{block}{with_tool_calls(body, message.get('tool_calls', ()))}{END}\n"


def _tool(messages: Sequence[Message], i: int) -> str:
    """Returns the text of message `i`, a tool's answer. Consecutive answers of tools form one user message: only the
    first answer opens it, and only the last answer closes it."""
    first = not i or messages[i - 1]["role"] != "tool"
    last = i == len(messages) - 1 or messages[i + 1]["role"] != "tool"
    header = f"{START}user" if first else ""
    end = f"{END}\n" if last else ""
    return f"{header}\n{TOOL_RESPONSE}\n{messages[i]['content']}\n{TOOL_RESPONSE_END}{end}"


RENDERER = Qwen3Renderer
