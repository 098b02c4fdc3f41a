"""OpenAI's `/v1/completions`: prompts as text or token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from service.asked import Asked, ServiceAnswer
from service.dialects.chat import DONE, StreamOptions, sampling_params, stop_strings
from service.dialects.wire import (
    Absent,
    Answers,
    Body,
    Few,
    Many,
    MinP,
    NoPenalty,
    Penalty,
    Seed,
    Stop,
    StopIds,
    Stops,
    Temperature,
    TokenId,
    Tokens,
    TopK,
    TopP,
    Used,
    event,
    new_id,
    now_s,
    only,
    piece_of,
    spans_of,
)
from service.front import Event

DEFAULT_TOKENS = 16
"""As OpenAI's, when `max_tokens` is left out."""
MOST_PROMPTS = 1024


class CompletionRequest(Body):
    """The body of a request."""

    model: str
    prompt: (
        str
        | Annotated[Many[TokenId], Field(min_length=1)]
        | Annotated[Many[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[Many[Many[TokenId]], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    max_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Answers | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int | None, only(0)] = None
    echo: Annotated[bool | None, only(False)] = None
    best_of: Annotated[int | None, only(1)] = None
    suffix: Absent = None
    user: str | None = None
    frequency_penalty: NoPenalty = None
    presence_penalty: NoPenalty = None
    logit_bias: Annotated[dict[str, float] | None, Few, only({})] = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Penalty | None = None
    stop_token_ids: StopIds | None = None
    return_token_ids: bool | None = None

    def asked(self) -> Asked:
        """Returns the request as the service takes it."""
        return Asked(
            model=self.model,
            params=sampling_params(self, self.max_tokens or DEFAULT_TOKENS),
            prompts=self._prompts(),
            stop=stop_strings(self.stop),
            n=self.n or 1,
            logprobs=self.logprobs is not None,
            token_ids=bool(self.return_token_ids),
            stream=bool(self.stream),
        )

    def _prompts(self) -> Sequence[str | Sequence[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        ids = [each for each in prompt if isinstance(each, int)]
        return [ids] if ids else [each for each in prompt if not isinstance(each, int)]


def whole(body: CompletionRequest, answers: Sequence[ServiceAnswer], tokenizer: Any) -> dict[str, Any]:
    """Returns the body of the whole answer."""
    head = {"id": new_id("cmpl-"), "object": "text_completion", "created": now_s(), "model": body.model}
    choices = [_choice(body, answer, tokenizer) for answer in answers]
    return {**head, "choices": choices, "usage": Used.of(answers, body.n or 1).openai()}


def _choice(body: CompletionRequest, answer: ServiceAnswer, tokenizer: Any) -> dict[str, Any]:
    sampled = answer.sequence
    tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
    choice = {
        "index": answer.choice,
        "text": answer.content,
        "finish_reason": answer.finish,
        "logprobs": _logprobs(tokenizer, tokens, logprobs, 0) if body.logprobs is not None else None,
    }
    if body.return_token_ids:
        spans = spans_of(answer.sequence.spans)
        choice |= {"prompt_token_ids": answer.prompt.tolist(), "token_ids": tokens, "version_spans": spans}
    return choice


def _logprobs(tokenizer: Any, tokens: Sequence[int], logprobs: Sequence[float], offset: int) -> dict[str, Any]:
    texts = [str(tokenizer.decode([token])) for token in tokens]
    offsets = [offset]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": list(logprobs),
        "text_offset": offsets[: len(texts)],
        "top_logprobs": None,
    }


async def stream(body: CompletionRequest, events: AsyncIterator[Event], tokenizer: Any) -> AsyncIterator[str]:
    """Yields the answer as server-sent events."""
    head = {"id": new_id("cmpl-"), "object": "text_completion", "created": now_s(), "model": body.model}
    used, offsets = Used(), dict[int, int]()
    async for each in events:
        ends = isinstance(each, ServiceAnswer)
        piece = piece_of(each) if isinstance(each, ServiceAnswer) else each
        choice: dict[str, Any] = {"index": each.choice, "text": piece.content, "finish_reason": None, "logprobs": None}
        if body.logprobs is not None:
            offset = offsets.get(each.choice, 0)
            found = _logprobs(tokenizer, piece.tokens, piece.logprobs, offset)
            choice["logprobs"] = found
            offsets[each.choice] = offset + sum(map(len, found["tokens"]))
        if body.return_token_ids:
            choice["token_ids"] = list(piece.tokens)
        if isinstance(each, ServiceAnswer):
            used.add(each, body.n or 1)
            choice["finish_reason"] = each.finish
            if body.return_token_ids:
                choice |= {"prompt_token_ids": each.prompt.tolist(), "version_spans": spans_of(each.sequence.spans)}
        if ends or piece.content or body.logprobs is not None or body.return_token_ids:
            yield event({**head, "choices": [choice]})
    if body.stream_options and body.stream_options.include_usage:
        yield event({**head, "choices": [], "usage": used.openai()})
    yield DONE
