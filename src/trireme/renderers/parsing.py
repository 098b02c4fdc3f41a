"""What an assistant's text says: its thinking, its calls of tools, and the rest. All of it may be hostile."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from trireme.renderers.types import Message, ToolCall

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"


def parse_text(text: str) -> tuple[Message, bool]:
    """The message that an assistant wrote as `text`, without the end of its turn.

    False: its thinking or a tool call has no end or no beginning, or a call is no JSON object with a name and
    arguments; then `content` holds it as it is."""
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
    """What follows `<tool_call>`, up to the next one; none if that is no call and nothing but it."""
    written, closed, rest = block.partition(CALL_END)
    call = read_json(written) if closed and not rest.strip() else None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return ToolCall(name=call["name"], arguments=call["arguments"]) if isinstance(call.get("arguments"), dict) else None


def read_json(text: str) -> Any:
    """What the JSON text says; none for anything that is not JSON, is too deep, or has no place in UTF-8."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
