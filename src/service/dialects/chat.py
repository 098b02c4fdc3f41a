"""OpenAI's `/v1/chat/completions`. Beside OpenAI's fields there are vLLM's for sampling and token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from service.asked import Delta, RequestRefused, ServiceAnswer, ServiceRequest, TurnRequest
from service.dialects.wire import (
    Absent,
    Answers,
    Body,
    Content,
    Few,
    FunctionCall,
    FunctionTool,
    Many,
    MinP,
    NoPenalty,
    Penalty,
    SampledBody,
    Seed,
    Stop,
    StopIds,
    Stops,
    TokenId,
    Tokens,
    TopK,
    Used,
    arguments_text,
    call_id,
    check_tool_choice,
    event,
    named_answers,
    new_id,
    now_s,
    only,
    spans_of,
    text_of,
)
from service.reading import UNFINISHED
from trireme.core.types import SamplingParams
from trireme.renderers import Message, ToolCall

DONE = "data: [DONE]\n\n"
ROLES_OF = {
    "tool_calls": ("assistant",),
    "reasoning_content": ("assistant",),
    "token_ids": ("assistant",),
    "prompt_token_ids": ("assistant",),
    "tool_call_id": ("tool",),
}
"""Fields of a message, and the roles of messages that may have them."""
USUAL_FIELDS = frozenset({"role", "content"})
"""Those of nearly all messages of a long conversation, which comes whole with each request."""


class ChatToolCall(Body):
    """A call of a tool in a message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class ChatMessage(Body):
    """A message. `token_ids` of one of the assistant's are the tokens as which it was sampled, with what ended it, and
    `prompt_token_ids` the prompt: with them it is never tokenised again."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Many[ChatToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Annotated[str | None, only()] = None
    annotations: Annotated[list[Any] | None, only([])] = None
    audio: Absent = None
    function_call: Absent = None
    token_ids: Many[TokenId] | None = None
    prompt_token_ids: Many[TokenId] | None = None

    def message(self) -> Message:
        """Returns the message as renderers take it. Raises RequestRefused."""
        role = "system" if self.role == "developer" else self.role
        found: Message = {"role": role, "content": text_of(self.content)}
        if self.model_fields_set <= USUAL_FIELDS:
            return found
        self._check_fields()
        if self.reasoning_content:
            found["thinking"] = self.reasoning_content
        if self.tool_calls:
            found["tool_calls"] = [each.function.call() for each in self.tool_calls]
        if self.token_ids:
            found["tokens"] = self.token_ids
            if self.prompt_token_ids:
                found["prompt"] = self.prompt_token_ids
        if self.name and role == "tool":
            found["name"] = self.name
        return found

    def _check_fields(self) -> None:
        """Raises RequestRefused for a field that says nothing in a message of this role: it would be ignored."""
        strange = [f for f, roles in ROLES_OF.items() if getattr(self, f) and self.role not in roles]
        if self.prompt_token_ids and not self.token_ids:
            strange.append("prompt_token_ids")
        if strange:
            raise RequestRefused(
                f"`{strange[0]}` in a message of role {self.role}; expected it in one of role "
                f"{' or '.join(ROLES_OF[strange[0]])}"
                + (" with token_ids" if strange[0] == "prompt_token_ids" else ""),
                param="messages",
            )


class ChatTool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionTool


class ResponseFormat(Body):
    """The form of an answer: text is the only one."""

    type: Annotated[str, only("text")]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, only(False)] = None


class OpenAIBody(SampledBody):
    """The fields that OpenAI's chat completions and completions share, with vLLM's behind them."""

    max_tokens: Tokens | None = None
    n: Answers | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    frequency_penalty: NoPenalty = None
    presence_penalty: NoPenalty = None
    logit_bias: Annotated[dict[str, float] | None, Few, only({})] = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Penalty | None = None
    stop_token_ids: StopIds | None = None
    return_token_ids: bool | None = None

    def openai_params(self, max_tokens: int | None) -> SamplingParams:
        """Returns how to sample."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return self.sampling_params(
            max_tokens,
            top_k=self.top_k or -1,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            stop=(*(self.stop_token_ids or ()), *strings),
            seed=self.seed,
        )


class ChatRequest(OpenAIBody):
    """The body of a request."""

    messages: Annotated[Many[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None
    tools: Many[ChatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Annotated[bool | None, only(True)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, only(0)] = None
    metadata: Annotated[dict[str, str] | None, Few] = None
    store: Annotated[bool | None, only(False)] = None
    response_format: ResponseFormat | None = None
    service_tier: Annotated[str | None, only("auto", "default")] = None
    modalities: Annotated[Many[str] | None, only(["text"])] = None
    audio: Absent = None
    prediction: Absent = None
    reasoning_effort: Absent = None
    verbosity: Absent = None
    web_search_options: Absent = None
    functions: Absent = None
    function_call: Absent = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def service_request(self) -> ServiceRequest:
        """Returns the request as the service takes it. Raises RequestRefused."""
        tools = check_tool_choice(self.tool_choice, [tool.function.spec() for tool in self.tools or ()])
        params = self.openai_params(self.max_completion_tokens or self.max_tokens)
        turn = TurnRequest(tuple(self._messages()), tuple(tools), params=params, n=self.n or 1)
        return ServiceRequest(self.model, [turn], bool(self.stream))

    def _messages(self) -> Sequence[Message]:
        calls = {call.id: call.function.name for each in self.messages for call in each.tool_calls or ()}
        ids = {
            i: each.tool_call_id for i, each in enumerate(self.messages) if each.role == "tool" and each.tool_call_id
        }
        return named_answers([each.message() for each in self.messages], calls, ids)


# ----------------------------------------------------------------------------------------------------------- answers


def whole(body: ChatRequest, answers: Sequence[ServiceAnswer], tokenizer: Any) -> dict[str, Any]:
    """Returns the body of the whole answer."""
    used = Used.of(answers, body.n or 1)
    found = {**_head(body, new_id("chatcmpl-"), "chat.completion"), "usage": used.openai()}
    found["choices"] = [_choice(body, answer, tokenizer) for answer in answers]
    if body.return_token_ids:
        found["prompt_token_ids"] = answers[0].prompt.tolist()
    return found


def _choice(body: ChatRequest, answer: ServiceAnswer, tokenizer: Any) -> dict[str, Any]:
    calls = _calls(answer.tool_calls)
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if calls else "")}
    if answer.thinking:
        message["reasoning_content"] = answer.thinking
    if calls:
        message["tool_calls"] = calls
    sampled = answer.sequence
    choice = {
        "index": answer.choice,
        "message": message,
        "finish_reason": answer.finish,
        "logprobs": _logprobs(tokenizer, sampled.tokens.tolist(), sampled.logprobs.tolist()) if body.logprobs else None,
    }
    if body.return_token_ids:
        choice |= {"token_ids": sampled.tokens.tolist(), "version_spans": spans_of(answer.sequence.spans)}
    return choice


def _head(body: ChatRequest, name: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": now_s(), "model": body.model}


def _calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {"id": call_id(), "type": "function", "function": {"name": call["name"], "arguments": arguments_text(call)}}
        for call in calls
    ]


def _logprobs(tokenizer: Any, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    rows = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        text = str(tokenizer.decode([token]))
        known = None if UNFINISHED in text else list(text.encode())  # it is a part of a letter
        rows.append({"token": text, "logprob": logprob, "bytes": known, "top_logprobs": []})
    return {"content": rows}


async def stream(body: ChatRequest, pieces: AsyncIterator[Delta], tokenizer: Any) -> AsyncIterator[str]:
    """Yields the answer as server-sent events."""
    begun: set[int] = set()

    def choice(piece: Delta, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": piece.choice, "delta": delta, "finish_reason": None, **more}

    def choices(piece: Delta) -> Iterator[dict[str, Any]]:
        if piece.choice not in begun:
            begun.add(piece.choice)
            yield choice(piece, {"role": "assistant", "content": ""})
        if (delta := _delta(piece)) or body.logprobs or body.return_token_ids:
            yield choice(piece, delta, **_extras(body, piece, tokenizer))
        if answer := piece.answer:
            for i, call in enumerate(_calls(answer.tool_calls)):
                yield choice(piece, {"tool_calls": [{"index": i, **call}]})
            more = {"prompt_token_ids": answer.prompt.tolist(), "version_spans": spans_of(answer.sequence.spans)}
            yield choice(piece, {}, **({"finish_reason": answer.finish} | (more if body.return_token_ids else {})))

    async for text in chunks(body, _head(body, new_id("chatcmpl-"), "chat.completion.chunk"), pieces, choices):
        yield text


async def chunks(
    body: OpenAIBody,
    head: dict[str, Any],
    pieces: AsyncIterator[Delta],
    choices: Callable[[Delta], Iterator[dict[str, Any]]],
) -> AsyncIterator[str]:
    """Yields the events of a stream, one for each of the `choices` of each piece, and its end."""
    used = Used()
    async for piece in pieces:
        for choice in choices(piece):
            yield event({**head, "choices": [choice]})
        if piece.answer:
            used.add(piece.answer, body.n or 1)
    if body.stream_options and body.stream_options.include_usage:
        yield event({**head, "choices": [], "usage": used.openai()})
    yield DONE


def _delta(piece: Delta) -> dict[str, Any]:
    found = {"reasoning_content": piece.thinking, "content": piece.content}
    return {key: text for key, text in found.items() if text}


def _extras(body: ChatRequest, piece: Delta, tokenizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if body.logprobs:
        found["logprobs"] = _logprobs(tokenizer, piece.tokens, piece.logprobs)
    if body.return_token_ids:
        found["token_ids"] = list(piece.tokens)
    return found
