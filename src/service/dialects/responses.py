"""OpenAI's `/v1/responses`. Nothing is stored: each request holds the whole conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from service.asked import Delta, ServiceAnswer, ServiceRequest, TurnRequest
from service.dialects.wire import (
    Absent,
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
    call_id,
    check_tool_choice,
    event,
    named_answers,
    new_id,
    now_s,
    only,
    text_of,
)
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
    """A call of a function that the model made."""

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
    """A part of the model's thinking."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Body):
    """The model's thinking before its next message."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Many[ReasoningText] = Field([])
    content: Many[ReasoningText] | None = None
    encrypted_content: Annotated[str | None, only()] = None
    status: str | None = None


Item = InputMessage | InputCall | InputResult | InputReasoning


class ResponseTool(FunctionTool):
    """A tool that the model may call."""

    type: Literal["function"]


class TextFormat(Body):
    """The form of the text: plain."""

    type: Annotated[str, only("text")]


class TextOptions(Body):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Annotated[str | None, only("medium")] = None


class ResponseRequest(SampledBody):
    """The body of a request."""

    input: str | Annotated[Many[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    tools: Many[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Annotated[bool | None, only(True)] = None
    text: TextOptions | None = None
    metadata: Annotated[dict[str, str] | None, Few] = None
    user: str | None = None
    store: Annotated[bool | None, only(False)] = None
    truncation: Annotated[str | None, only("disabled")] = None
    include: Annotated[Many[str] | None, only([])] = None
    top_logprobs: Annotated[int | None, only(0)] = None
    service_tier: Annotated[str | None, only("auto", "default")] = None
    background: Annotated[bool | None, only(False)] = None
    previous_response_id: Absent = None
    conversation: Absent = None
    reasoning: Absent = None
    prompt: Absent = None
    max_tool_calls: Absent = None
    stream_options: Absent = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def service_request(self) -> ServiceRequest:
        """Returns the request as the service takes it. Raises RequestRefused."""
        tools = check_tool_choice(self.tool_choice, [tool.spec() for tool in self.tools or ()])
        params = self.sampling_params(self.max_output_tokens)
        turn = TurnRequest(tuple(self._messages()), tuple(tools), params=params)
        return ServiceRequest(self.model, [turn], bool(self.stream))

    def _messages(self) -> Sequence[Message]:
        found: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        calls: dict[str, str] = {}
        ids: dict[int, str] = {}
        speaks = False  # the last items are parts of one message of the assistant
        for item in self.input:
            if isinstance(item, InputResult):
                ids[len(found)] = item.call_id
                found.append({"role": "tool", "content": text_of(item.output)})
                speaks = False
            elif isinstance(item, InputMessage) and item.role != "assistant":
                role = "system" if item.role == "developer" else item.role
                found.append({"role": role, "content": text_of(item.content)})
                speaks = False
            else:
                if not speaks:
                    found.append({"role": "assistant", "content": ""})
                speaks = True
                _add(found[-1], item, calls)
        return named_answers(found, calls, ids)


def _add(message: Message, item: InputMessage | InputCall | InputReasoning, calls: dict[str, str]) -> None:
    """Adds an item to the assistant's message; notes the names of its calls by their ids."""
    if isinstance(item, InputMessage):
        message["content"] += text_of(item.content)
    elif isinstance(item, InputCall):
        calls[item.call_id] = item.name
        message.setdefault("tool_calls", []).append(item.call())
    else:
        text = "".join(part.text for part in item.content or item.summary)
        if text:
            message["thinking"] = message.get("thinking", "") + text


# ----------------------------------------------------------------------------------------------------------- answers


def whole(body: ResponseRequest, answers: Sequence[ServiceAnswer], tokenizer: Any) -> dict[str, Any]:
    """Returns the body of the whole answer."""
    (answer,) = answers
    items = _Items()
    items.add(answer)
    items.finish(answer)
    return _ended(_head(body), answer, items.done)


def _head(body: ResponseRequest) -> dict[str, Any]:
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": now_s(),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [each.model_dump() for each in body.tools or ()],
        "top_p": body.top_p or 1.0,
        "truncation": "disabled",
        "usage": None,
    }


def _ended(head: Mapping[str, Any], answer: ServiceAnswer, output: list[dict[str, Any]]) -> dict[str, Any]:
    used = Used.of([answer], 1)
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


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}


def _call(call: ToolCall) -> dict[str, Any]:
    head = {"type": "function_call", "id": new_id("fc_"), "call_id": call_id(), "status": "completed"}
    return {**head, "name": call["name"], "arguments": arguments_text(call)}


async def stream(body: ResponseRequest, pieces: AsyncIterator[Delta], tokenizer: Any) -> AsyncIterator[str]:
    """Yields the answer as server-sent events."""
    head, items = _head(body), _Items()
    yield items.event("response.created", response=head)
    yield items.event("response.in_progress", response=head)
    async for piece in pieces:
        for text in items.add(piece):
            yield text
        if answer := piece.answer:
            for text in items.finish(answer):
                yield text
            kind = "response.incomplete" if answer.finish == "length" else "response.completed"
            yield items.event(kind, response=_ended(head, answer, items.done))


class _Items:
    """The items of a stream: one is open at a time, and holds one part."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._number = 0
        self._open: dict[str, Any] | None = None
        self._text = ""

    def event(self, kind: str, **fields: Any) -> str:
        """Writes an event with its number."""
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def add(self, piece: Delta | ServiceAnswer) -> list[str]:
        """Returns the events of more thinking and text."""
        return [*self._more("reasoning", piece.thinking), *self._more("message", piece.content)]

    def finish(self, answer: ServiceAnswer) -> list[str]:
        """Returns the events of the end of what is open, and of the tools that are called."""
        found = [] if self._open or self.done or answer.tool_calls else self._begin("message")
        found += self._close()
        for call in map(_call, answer.tool_calls):
            place, begun = len(self.done), {**call, "arguments": "", "status": "in_progress"}
            found.append(self.event("response.output_item.added", output_index=place, item=begun))
            at = {"item_id": call["id"], "output_index": place}
            arguments = call["arguments"]
            found.append(self.event("response.function_call_arguments.delta", **at, delta=arguments))
            done = {"arguments": arguments, "name": call["name"]}
            found.append(self.event("response.function_call_arguments.done", **at, **done))
            found.append(self._item_done(call))
        return found

    def _more(self, kind: str, text: str) -> list[str]:
        if not text:
            return []
        found = [] if self._open and self._open["type"] == kind else [*self._close(), *self._begin(kind)]
        self._text += text
        return [*found, self.event(f"response.{self._part_kind}.delta", **self._at, delta=text, **self._logprobs)]

    def _begin(self, kind: str) -> list[str]:
        item: dict[str, Any] = {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": []}
        if kind == "message":
            item = {"type": kind, "id": new_id("msg_"), "role": "assistant", "status": "in_progress", "content": []}
        self._open, self._text = item, ""
        added = self.event("response.output_item.added", output_index=len(self.done), item=item)
        part = _part(self._part_kind, "")
        return [added, self.event("response.content_part.added", **self._at, part=part)]

    def _close(self) -> list[str]:
        if self._open is None:
            return []
        part = _part(self._part_kind, self._text)
        found = [
            self.event(f"response.{self._part_kind}.done", **self._at, text=self._text, **self._logprobs),
            self.event("response.content_part.done", **self._at, part=part),
        ]
        item = {**self._open, "content": [part]}
        if item["type"] == "message":
            item["status"] = "completed"
        found.append(self._item_done(item))
        self._open = None
        return found

    def _item_done(self, item: dict[str, Any]) -> str:
        self.done.append(item)
        return self.event("response.output_item.done", output_index=len(self.done) - 1, item=item)

    @property
    def _part_kind(self) -> str:
        assert self._open is not None
        return "output_text" if self._open["type"] == "message" else "reasoning_text"

    @property
    def _at(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.done), "content_index": 0}

    @property
    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._part_kind == "output_text" else {}
