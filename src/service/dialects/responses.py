"""OpenAI's `/v1/responses`. Nothing is stored: each request holds the whole conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from service.dialects.wire import (
    Body,
    Content,
    Few,
    FunctionCall,
    FunctionTool,
    Many,
    SampledBody,
    Tokens,
    Used,
    arguments_text,
    check_tool_choice,
    event,
    new_id,
    now_s,
    text_of,
    tool_answer,
)
from service.requests import Delta, ServiceAnswer, TurnRequest
from trireme.core.finite_json import JsonObject
from trireme.core.tokenizer import Tokenizer
from trireme.renderers import Message, ToolCall


class InputMessage(Body):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(FunctionCall):
    """An earlier function call by the model, as a part of the input."""

    type: Literal["function_call"]
    call_id: str
    id: str | None = None
    status: str | None = None


class InputResult(Body):
    """The answer of a function."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None


class ReasoningText(Body):
    """A text in the model's thinking."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Body):
    """The model's thinking before its next message."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Many[ReasoningText] = Field([])
    content: Many[ReasoningText] | None = None
    status: str | None = None


Item = InputMessage | InputCall | InputResult | InputReasoning


class ResponseTool(FunctionTool):
    """A tool that the model may call."""

    type: Literal["function"]


class TextOptions(Body):
    """Options for the text of an answer; only NEUTRAL ones are supported."""


class ResponseRequest(SampledBody):
    """The body of a request to `/v1/responses`."""

    input: str | Annotated[Many[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    tools: Many[ResponseTool] | None = None
    tool_choice: str | JsonObject | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[str, str] | None, Few] = None
    user: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def turns(self) -> Sequence[TurnRequest]:
        tools = check_tool_choice(self.tool_choice, (tool.spec() for tool in self.tools or ()))
        return [TurnRequest(tuple(self._messages()), tools, params=self.sampling_params(self.max_output_tokens))]

    def _messages(self) -> Sequence[Message]:
        messages: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        calls: dict[str, str] = {}
        for item in self.input:
            if isinstance(item, InputResult):
                messages.append(tool_answer(item.output, item.call_id, calls))
            elif isinstance(item, InputMessage) and item.role != "assistant":
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": text_of(item.content)})
            else:
                if not messages or messages[-1]["role"] != "assistant":  # else it is a part of the same message
                    messages.append({"role": "assistant", "content": ""})
                _add(messages[-1], item, calls)
        return messages

    # ---- answers

    def whole(self, answers: Sequence[ServiceAnswer], tokenizer: Tokenizer) -> JsonObject:
        (answer,) = answers
        items = _Items()
        items.add(answer)
        items.finish(answer)
        return _final(self._head(), answer, items.finished)

    def _head(self) -> JsonObject:
        return {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": now_s(),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_p": self.top_p or 1.0,
            "truncation": "disabled",
            "usage": None,
        }

    async def events(self, pieces: AsyncIterator[Delta], tokenizer: Tokenizer) -> AsyncIterator[str]:
        head = self._head()
        items = _Items()
        yield items.event("response.created", response=head)
        yield items.event("response.in_progress", response=head)
        async for piece in pieces:
            for text in items.add(piece):
                yield text
            answer = piece.answer
            if answer:
                for text in items.finish(answer):
                    yield text
                if answer.finish == "length":
                    kind = "response.incomplete"
                else:
                    kind = "response.completed"
                yield items.event(kind, response=_final(head, answer, items.finished))


def _add(message: Message, item: InputMessage | InputCall | InputReasoning, calls: dict[str, str]) -> None:
    """Adds `item` to the assistant's `message`. If the item is a tool call, also adds the name of the tool to `calls`,
    by the id of the call."""
    if isinstance(item, InputMessage):
        message["content"] += text_of(item.content)
    elif isinstance(item, InputCall):
        calls[item.call_id] = item.name
        message.setdefault("tool_calls", []).append(item.call())
    else:
        text = "".join(part.text for part in item.content or item.summary)
        if text:
            message["thinking"] = message.get("thinking", "") + text


def _final(head: Mapping[str, object], answer: ServiceAnswer, output: list[JsonObject]) -> JsonObject:
    used = Used([answer])
    cut = answer.finish == "length"
    return {
        **head,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": {
            "input_tokens": used.prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": used.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used.prompt + used.completion,
            **used.versions,
        },
    }


def _call(call: ToolCall) -> JsonObject:
    head = {"type": "function_call", "id": new_id("fc_"), "call_id": new_id("call_"), "status": "completed"}
    return {**head, "name": call["name"], "arguments": arguments_text(call)}


class _Items:
    """Writes the output items of a stream as events; only one item is open at a time, with one content part."""

    def __init__(self) -> None:
        self.finished: list[JsonObject] = []
        self._number = 0
        self._open: JsonObject = {}
        self._part: dict[str, Any] = {}

    def event(self, kind: str, **fields: object) -> str:
        """Returns a server-sent event with its sequence number."""
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def add(self, piece: Delta | ServiceAnswer) -> list[str]:
        """Returns the events for the new thinking and text of a piece."""
        return [*self._added("reasoning_text", piece.thinking), *self._added("output_text", piece.content)]

    def finish(self, answer: ServiceAnswer) -> list[str]:
        """Returns the events that end the open item, and then the events of one further item for each tool call of the
        answer."""
        if self._open or self.finished or answer.tool_calls:
            events = []
        else:
            events = self._begin("output_text")
        events += self._close()
        for call in map(_call, answer.tool_calls):
            place = len(self.finished)
            arguments = call["arguments"]
            begun = {**call, "arguments": "", "status": "in_progress"}
            events.append(self.event("response.output_item.added", output_index=place, item=begun))
            at = {"item_id": call["id"], "output_index": place}
            events.append(self.event("response.function_call_arguments.delta", **at, delta=arguments))
            call_fields = {"arguments": arguments, "name": call["name"]}
            events.append(self.event("response.function_call_arguments.done", **at, **call_fields))
            events.append(self._item_done(call))
        return events

    def _added(self, kind: str, text: str) -> list[str]:
        if not text:
            return []
        if self._open and self._part["type"] == kind:
            events = []
        else:
            events = [*self._close(), *self._begin(kind)]
        self._part["text"] += text
        return [*events, self._text_event("delta", delta=text)]

    def _begin(self, kind: str) -> list[str]:
        self._part = {"type": kind, "text": ""}
        self._open = {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": []}
        if kind == "output_text":
            self._part["annotations"] = []
            message = {"type": "message", "role": "assistant", "status": "in_progress", "content": []}
            self._open = {"id": new_id("msg_"), **message}
        added = self.event("response.output_item.added", output_index=len(self.finished), item=self._open)
        return [added, self._part_event("content_part.added", part=self._part)]

    def _close(self) -> list[str]:
        if not self._open:
            return []
        text = self._text_event("done", text=self._part["text"])
        part = self._part_event("content_part.done", part=self._part)
        item = {**self._open, "content": [self._part]}
        if item["type"] == "message":
            item["status"] = "completed"
        self._open = {}
        return [text, part, self._item_done(item)]

    def _item_done(self, item: JsonObject) -> str:
        self.finished.append(item)
        return self.event("response.output_item.done", output_index=len(self.finished) - 1, item=item)

    def _text_event(self, kind: str, **fields: object) -> str:
        logprobs: JsonObject = {"logprobs": []} if self._part["type"] == "output_text" else {}
        return self._part_event(f"{self._part['type']}.{kind}", **fields, **logprobs)

    def _part_event(self, kind: str, **fields: object) -> str:
        at = {"item_id": self._open["id"], "output_index": len(self.finished), "content_index": 0}
        return self.event(f"response.{kind}", **at, **fields)
