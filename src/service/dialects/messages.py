"""Anthropic's `/v1/messages`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from service.dialects.wire import (
    Body,
    Many,
    SampledBody,
    Stops,
    Tokens,
    TopK,
    Used,
    arguments_text,
    event,
    new_id,
    text_of,
    tool_answer,
)
from service.requests import Delta, RequestRefused, ServiceAnswer, TurnRequest
from trireme.core.finite_json import JsonObject
from trireme.core.tokenizer import Tokenizer
from trireme.renderers import Message, ToolCall, ToolSpec

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class TextBlock(Body):
    """A block of text."""

    type: Literal["text"]
    text: str
    cache_control: object = None  # replicas cache every prefix


class ThinkingBlock(Body):
    """The model's thinking; its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Body):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: Annotated[str, Field(min_length=1)]
    input: JsonObject
    cache_control: object = None


class ToolResultBlock(Body):
    """The answer of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[TextBlock] | None = None
    is_error: bool | None = None  # the text of the answer tells it
    cache_control: object = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class AnthropicMessage(Body):
    """A message."""

    role: Literal["user", "assistant"]
    content: str | Many[Block]


class AnthropicTool(Body):
    """A tool that the model may call."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: JsonObject
    cache_control: object = None

    def spec(self) -> ToolSpec:
        """Returns the tool as renderers take it."""
        return ToolSpec(name=self.name, description=self.description or "", parameters=self.input_schema)


class AnthropicToolChoice(Body):
    """The choice of tools: a call cannot be forced."""

    type: Literal["auto", "none"]


class MessagesRequest(SampledBody):
    """The body of a request to `/v1/messages`."""

    messages: Annotated[Many[AnthropicMessage], Field(min_length=1)]
    max_tokens: Tokens
    system: str | Many[TextBlock] | None = None
    stop_sequences: Stops | None = None
    top_k: TopK | None = None
    tools: Many[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    metadata: JsonObject | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def turns(self) -> Sequence[TurnRequest]:
        silent = self.tool_choice is not None and self.tool_choice.type == "none"
        params = self.sampling_params(self.max_tokens, tuple(self.stop_sequences or ()))
        tools = () if silent else tuple(tool.spec() for tool in self.tools or ())
        return [TurnRequest(tuple(self._messages()), tools, params=params)]

    def _messages(self) -> Sequence[Message]:
        messages: list[Message] = []
        calls: dict[str, str] = {}
        if self.system:
            messages.append({"role": "system", "content": text_of(self.system)})
        if self.messages[-1].role == "assistant":
            raise RequestRefused(
                "the last message is the assistant's: the beginning of an answer cannot be given; expected the user's",
                param="messages",
            )
        for turn in self.messages:
            if isinstance(turn.content, str):
                messages.append({"role": turn.role, "content": turn.content})
            elif turn.role == "assistant":
                messages.append(_assistant(turn.content, calls))
            else:
                _add_user(turn.content, messages, calls)
        return messages

    # ---- answers

    def whole(self, answers: Sequence[ServiceAnswer], tokenizer: Tokenizer) -> JsonObject:
        (answer,) = answers
        blocks: list[JsonObject] = []
        if answer.thinking:
            blocks.append({"type": "thinking", "thinking": answer.thinking, "signature": ""})
        if answer.content or not answer.tool_calls:
            blocks.append({"type": "text", "text": answer.content, "citations": None})
        blocks += [{**_tool_use(call), "input": call["arguments"]} for call in answer.tool_calls]
        return {**self._head(), "content": blocks, "usage": _usage(answer), **_end(answer)}

    def _head(self) -> JsonObject:
        head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": self.model, "content": []}
        return {**head, "stop_reason": None, "stop_sequence": None}

    async def events(self, pieces: AsyncIterator[Delta], tokenizer: Tokenizer) -> AsyncIterator[str]:
        blocks = _Blocks()
        begun = False
        async for piece in pieces:
            if not begun:
                begun = True
                usage = {"input_tokens": piece.prompt_tokens, "output_tokens": 0, "version": piece.version}
                yield _event("message_start", message={**self._head(), "usage": usage})
            for text in (
                *blocks.add("thinking", piece.thinking, {"thinking": "", "signature": ""}),
                *blocks.add("text", piece.content, {"text": ""}),
            ):
                yield text
            answer = piece.answer
            if answer:
                for text in blocks.finish(answer):
                    yield text
                yield _event("message_delta", delta=_end(answer), usage=_usage(answer))
        yield _event("message_stop")


def _assistant(blocks: Sequence[Block], calls: dict[str, str]) -> Message:
    """Returns `blocks` as one message of the assistant. Adds each called tool's name to `calls`, by the id of the call.
    Raises RequestRefused for a tool result."""
    message: Message = {"role": "assistant", "content": ""}
    for block in blocks:
        if isinstance(block, TextBlock):
            message["content"] += block.text
        elif isinstance(block, ThinkingBlock):
            message["thinking"] = message.get("thinking", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            calls[block.id] = block.name
            message.setdefault("tool_calls", []).append(ToolCall(name=block.name, arguments=block.input))
        else:
            raise RequestRefused("a tool_result in a message of the assistant; expected the user's", param="messages")
    return message


def _add_user(blocks: Sequence[Block], messages: list[Message], calls: Mapping[str, str]) -> None:
    """Appends the user's `blocks` to `messages`: one message for each tool result, and one for each text between tool
    results. `calls`: the name of each tool called earlier, by the id of the call."""
    text = ""
    for block in blocks:
        if isinstance(block, TextBlock):
            text += block.text
        elif isinstance(block, ToolResultBlock):
            if text:
                messages.append({"role": "user", "content": text})
            text = ""
            messages.append(tool_answer(block.content, block.tool_use_id, calls))
        else:
            raise RequestRefused(f"a {block.type} in a message of the user; expected the assistant's", param="messages")
    if text or not blocks:
        messages.append({"role": "user", "content": text})


def _usage(answer: ServiceAnswer) -> Mapping[str, int]:
    used = Used([answer])
    return {"input_tokens": used.prompt, "output_tokens": used.completion, **used.versions}


def _tool_use(call: ToolCall) -> JsonObject:
    return {"type": "tool_use", "id": new_id("toolu_"), "name": call["name"]}


def _end(answer: ServiceAnswer) -> JsonObject:
    if answer.stopped_by:
        reason = "stop_sequence"
    else:
        reason = STOP_REASONS[answer.finish]
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by}


def _event(kind: str, **fields: object) -> str:
    return event({"type": kind, **fields}, kind)


class _Blocks:
    """Writes the content blocks of a stream as events; only one block is open at a time."""

    def __init__(self) -> None:
        self._count = 0
        self._open = ""

    def add(self, kind: str, text: str, empty: Mapping[str, str]) -> list[str]:
        """Returns the events that add `text` to a block of this `kind`; no events if `text` is empty. If no block of
        this kind is open, the events first close the open block, if there is one, and begin a new block. `empty`: the
        fields of the new block before its text, such as {"text": ""}."""
        if not text:
            return []
        if self._open == kind:
            begun = []
        else:
            begun = self._begin(kind, {"type": kind, **empty})
        return [*begun, self._delta({"type": f"{kind}_delta", kind: text})]

    def finish(self, answer: ServiceAnswer) -> list[str]:
        """Returns the events that close the open block, and then write one block for each tool call of the answer."""
        events: list[str] = []
        if not self._count and not answer.tool_calls:
            events += self._begin("text", {"type": "text", "text": ""})
        for call in answer.tool_calls:
            events += self._begin("tool_use", {**_tool_use(call), "input": {}})
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments_text(call)}))
        return [*events, *self._close()]

    def _begin(self, kind: str, block: Mapping[str, object]) -> list[str]:
        closed = self._close()
        self._open = kind
        self._count += 1
        return [*closed, _event("content_block_start", index=self._count - 1, content_block=block)]

    def _delta(self, delta: Mapping[str, object]) -> str:
        return _event("content_block_delta", index=self._count - 1, delta=delta)

    def _close(self) -> list[str]:
        if not self._open:
            return []
        self._open = ""
        return [_event("content_block_stop", index=self._count - 1)]
