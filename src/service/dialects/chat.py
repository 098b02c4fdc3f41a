"""OpenAI's `/v1/chat/completions`, with vLLM's additional fields for sampling and token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from service.dialects.wire import (
    Answers,
    Body,
    Content,
    Few,
    FunctionCall,
    FunctionTool,
    Many,
    MinP,
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
    check_tool_choice,
    event,
    new_id,
    now_s,
    spans_of,
    text_of,
    tool_answer,
)
from service.reading import UNFINISHED
from service.requests import Delta, RequestRefused, ServiceAnswer, TurnRequest
from trireme.core.finite_json import JsonObject
from trireme.core.tokenizer import Tokenizer
from trireme.core.types import SamplingParams
from trireme.renderers import Message

END = "data: [DONE]\n\n"
ROLES_OF = {
    "tool_calls": ("assistant",),
    "reasoning_content": ("assistant",),
    "token_ids": ("assistant",),
    "prompt_token_ids": ("assistant",),
    "tool_call_id": ("tool",),
}
"""Fields of a message, and the roles of messages that may have them."""
USUAL_FIELDS = frozenset({"role", "content"})
"""Fields of nearly all messages of a long conversation, which comes whole with each request."""


class ChatToolCall(Body):
    """A call of a tool in a message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class ChatMessage(Body):
    """A message of a chat request. `token_ids`: the sampled tokens of an assistant's message, with the end mark.
    `prompt_token_ids`: the tokens of the prompt that this message answered. If both fields are there, neither the
    message nor its prompt is tokenised again."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Many[ChatToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    token_ids: Many[TokenId] | None = None
    prompt_token_ids: Many[TokenId] | None = None

    def message(self, calls: dict[str, str]) -> Message:
        """Returns the message as renderers take it. `calls`: the name of each tool called earlier, by the id of the
        call; this method adds the calls of this message. Raises RequestRefused if a field does not fit the role of the
        message."""
        role = "system" if self.role == "developer" else self.role
        entry: Message = {"role": role, "content": text_of(self.content)}
        if self.model_fields_set <= USUAL_FIELDS:
            return entry
        self._check_fields()
        if self.tool_call_id:
            return tool_answer(self.content, self.tool_call_id, calls)
        if self.reasoning_content:
            entry["thinking"] = self.reasoning_content
        if self.tool_calls:
            calls |= {call.id: call.function.name for call in self.tool_calls}
            entry["tool_calls"] = [call.function.call() for call in self.tool_calls]
        if self.token_ids:
            entry["tokens"] = self.token_ids
            if self.prompt_token_ids:
                entry["prompt"] = self.prompt_token_ids
        if self.name and role == "tool":
            entry["name"] = self.name
        return entry

    def _check_fields(self) -> None:
        """Raises RequestRefused for a field that has no meaning in a message of this role, and would otherwise be
        ignored."""
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


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None


class OpenAIBody(SampledBody):
    """The fields that OpenAI's chat completions and completions share, and vLLM's additional fields."""

    max_tokens: Tokens | None = None
    n: Answers | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Penalty | None = None
    stop_token_ids: StopIds | None = None
    return_token_ids: bool | None = None

    def openai_params(self, max_tokens: int | None) -> SamplingParams:
        """Returns the sampling parameters of the request."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return self.sampling_params(max_tokens, (*(self.stop_token_ids or ()), *strings))

    def head(self, name: str, kind: str) -> JsonObject:
        """Returns the first fields of a reply's body, or of each event of a stream. `name`: the prefix of the reply's
        id; `kind`: the value of the field `object`."""
        return {"id": new_id(name), "object": kind, "created": now_s(), "model": self.model}

    async def chunks(
        self,
        head: JsonObject,
        pieces: AsyncIterator[Delta],
        choices: Callable[[Delta], Iterator[JsonObject]],
    ) -> AsyncIterator[str]:
        """Yields the server-sent events of a stream: one event for each choice that `choices` yields for a piece, then
        the usage if the client requested it, then the end mark. `head`: fields that every event has."""
        answers = []
        async for piece in pieces:
            for choice in choices(piece):
                yield event({**head, "choices": [choice]})
            if piece.answer:
                answers.append(piece.answer)
        if self.stream_options and self.stream_options.include_usage:
            yield event({**head, "choices": [], "usage": self.usage(answers)})
        yield END

    def usage(self, answers: Sequence[ServiceAnswer]) -> JsonObject:
        """Returns the field `usage` for whole answers: the numbers of tokens, and the newest and oldest version that
        sampled a token of the answers."""
        used = Used(answers, self.n or 1)
        total = used.prompt + used.completion
        counts = {"prompt_tokens": used.prompt, "completion_tokens": used.completion, "total_tokens": total}
        return {**counts, **used.versions}

    def ids_of(self, answer: ServiceAnswer) -> JsonObject:
        """Returns the fields with the prompt's token ids and the answer's version spans, for the last piece of an
        answer; no fields unless the client requested token ids."""
        if not self.return_token_ids:
            return {}
        return {"prompt_token_ids": answer.prompt.tolist(), "version_spans": spans_of(answer.sequence.spans)}


class ChatRequest(OpenAIBody):
    """The body of a request to `/v1/chat/completions`."""

    messages: Annotated[Many[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None
    tools: Many[ChatTool] | None = None
    tool_choice: str | JsonObject | None = None
    logprobs: bool | None = None
    metadata: Annotated[dict[str, str] | None, Few] = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def turns(self) -> Sequence[TurnRequest]:
        tools = check_tool_choice(self.tool_choice, (tool.function.spec() for tool in self.tools or ()))
        params = self.openai_params(self.max_completion_tokens or self.max_tokens)
        calls: dict[str, str] = {}
        messages = [message.message(calls) for message in self.messages]
        return [TurnRequest(tuple(messages), tools, params=params, n=self.n or 1)]

    # ---- answers

    def whole(self, answers: Sequence[ServiceAnswer], tokenizer: Tokenizer) -> JsonObject:
        choices = [self._choice(answer, tokenizer) for answer in answers]
        body = {**self.head("chatcmpl-", "chat.completion"), "choices": choices, "usage": self.usage(answers)}
        if self.return_token_ids:
            body["prompt_token_ids"] = answers[0].prompt.tolist()
        return body

    def _choice(self, answer: ServiceAnswer, tokenizer: Tokenizer) -> JsonObject:
        calls = _calls(answer)
        message: JsonObject = {"role": "assistant", "content": answer.content or (None if calls else "")}
        if answer.thinking:
            message["reasoning_content"] = answer.thinking
        if calls:
            message["tool_calls"] = calls
        tokens = self._tokens(answer, tokenizer)
        if self.return_token_ids:
            tokens["version_spans"] = spans_of(answer.sequence.spans)
        head = {"index": answer.choice, "finish_reason": answer.finish, "logprobs": None}
        return {**head, "message": message, **tokens}

    def _tokens(self, piece: Delta | ServiceAnswer, tokenizer: Tokenizer) -> JsonObject:
        """Returns the fields with the log-probabilities and the ids of a piece's tokens, as far as the client requested
        them."""
        fields: JsonObject = {}
        if self.logprobs:
            fields["logprobs"] = _logprobs(tokenizer, piece)
        if self.return_token_ids:
            fields["token_ids"] = list(piece.tokens)
        return fields

    async def events(self, pieces: AsyncIterator[Delta], tokenizer: Tokenizer) -> AsyncIterator[str]:
        begun: set[int] = set()

        def choice(piece: Delta, delta: JsonObject, **fields: object) -> JsonObject:
            return {"index": piece.choice, "delta": delta, "finish_reason": None, **fields}

        def choices(piece: Delta) -> Iterator[JsonObject]:
            if piece.choice not in begun:
                begun.add(piece.choice)
                yield choice(piece, {"role": "assistant", "content": ""})
            texts = {"reasoning_content": piece.thinking, "content": piece.content}
            delta: JsonObject = {name: text for name, text in texts.items() if text}
            tokens = self._tokens(piece, tokenizer)
            if delta or tokens:
                yield choice(piece, delta, **tokens)
            answer = piece.answer
            if answer:
                for i, call in enumerate(_calls(answer)):
                    yield choice(piece, {"tool_calls": [{"index": i, **call}]})
                yield choice(piece, {}) | {"finish_reason": answer.finish} | self.ids_of(answer)

        async for text in self.chunks(self.head("chatcmpl-", "chat.completion.chunk"), pieces, choices):
            yield text


def _calls(answer: ServiceAnswer) -> list[JsonObject]:
    return [
        {
            "id": new_id("call_"),
            "type": "function",
            "function": {"name": call["name"], "arguments": arguments_text(call)},
        }
        for call in answer.tool_calls
    ]


def _logprobs(tokenizer: Tokenizer, piece: Delta | ServiceAnswer) -> JsonObject:
    rows = []
    for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
        text = str(tokenizer.decode([token]))
        utf8 = None if UNFINISHED in text else list(text.encode())  # it is a part of a letter
        rows.append({"token": text, "logprob": logprob, "bytes": utf8, "top_logprobs": []})
    return {"content": rows}
