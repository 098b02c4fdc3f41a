"""The tags for thinking and tool calls that Qwen3 was trained with, and functions that write and parse text with them.

Also used by `role_colon` and for chat templates with the same tags. The text that a model sampled may be hostile.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from trireme.core.finite_json import to_json
from trireme.renderers.conversation import Message, ToolCall, ToolSpec

THINK = "<think>"
THINK_END = "</think>"
CALL = "<tool_call>"
CALL_END = "</tool_call>"
TOOL_RESPONSE = "<tool_response>"
TOOL_RESPONSE_END = "</tool_response>"


def tool_schema(tool: ToolSpec) -> dict[str, object]:
    """Returns a tool in the form in which chat templates take it."""
    return {"type": "function", "function": dict(tool)}


def describe_tools(tools: Sequence[ToolSpec]) -> str:
    """Returns the part of a system message that lists the tools and tells how to call them."""
    listed = "".join(f"\n{to_json(tool_schema(tool), ensure_ascii=False)}" for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        f"{CALL}{CALL_END} XML tags:\n{CALL}\n"
        f'{{"name": <function-name>, "arguments": <args-json-object>}}\n{CALL_END}'
    )


def thinking_block(thinking: str) -> str:
    """Returns the thinking between its tags, followed by an empty line."""
    stripped = thinking.strip("\n")
    return f"{THINK}\n{stripped}\n{THINK_END}\n\n"


def with_tool_calls(content: str, calls: Sequence[ToolCall]) -> str:
    """Returns the content of a message, followed by its tool calls in their tags."""
    blocks = [
        f'{CALL}\n{{"name": "{call["name"]}", "arguments": {to_json(call["arguments"], ensure_ascii=False)}}}\n'
        f"{CALL_END}"
        for call in calls
    ]
    return "\n".join([content, *blocks] if content or not blocks else blocks)


def parse_text(text: str) -> tuple[Message, bool]:
    """Parses the `text` of an assistant's message, without its end mark. Returns the message, and True if it is well
    formed.

    The message is malformed if its thinking or a tool call lacks the opening or the closing tag, if other text comes
    before the thinking or after a tool call, or if a call is not a JSON object with a name and arguments. The second
    value is then False, the message has no `tool_calls`, and `content` is all text after the thinking, calls included.
    """
    message: Message = {"role": "assistant", "content": text}
    if text.lstrip().startswith(THINK):
        thinking, closed, rest = text.lstrip().removeprefix(THINK).partition(THINK_END)
        message["thinking"] = thinking.strip("\n")
        message["content"] = rest.lstrip("\n")
        if not closed:
            return message, False
    if THINK in message["content"] or THINK_END in message["content"]:
        return message, False
    content, *blocks = message["content"].split(CALL)
    calls = [_call(block) for block in blocks]
    if None in calls or CALL_END in content:
        return message, False
    if calls:
        message["content"] = content.rstrip("\n")
        message["tool_calls"] = [call for call in calls if call]
    return message, True


def _call(block: str) -> ToolCall | None:
    """Parses `block`, the text after a `<tool_call>` up to the next `<tool_call>`. Returns None if it is anything but
    one well-formed call."""
    written, closed, rest = block.partition(CALL_END)
    if closed and not rest.strip():
        call = read_json(written)
    else:
        call = None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    if isinstance(call.get("arguments"), dict):
        return ToolCall(name=call["name"], arguments=call["arguments"])
    return None


def read_json(text: str) -> Any:
    """Reads JSON; None for text that is not JSON, is nested too deeply, or cannot be written in UTF-8."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        to_json(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
