"""OpenAI's `/v1/completions`: prompts as text or token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from service.asked import Delta, ServiceAnswer, ServiceRequest, TurnRequest
from service.dialects.chat import OpenAIBody, chunks
from service.dialects.wire import Absent, Many, TokenId, Used, new_id, now_s, only, spans_of

DEFAULT_TOKENS = 16
"""As OpenAI's, when `max_tokens` is left out."""
MOST_PROMPTS = 1024


class CompletionRequest(OpenAIBody):
    """The body of a request."""

    prompt: (
        str
        | Annotated[Many[TokenId], Field(min_length=1)]
        | Annotated[Many[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[Many[Many[TokenId]], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Annotated[int | None, only(0)] = None
    echo: Annotated[bool | None, only(False)] = None
    best_of: Annotated[int | None, only(1)] = None
    suffix: Absent = None

    def service_request(self) -> ServiceRequest:
        """Returns the request as the service takes it."""
        params, prompt = self.openai_params(self.max_tokens or DEFAULT_TOKENS), self.prompt
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        turns = [
            TurnRequest(text=one, params=params, n=self.n or 1)
            if isinstance(one, str)
            else TurnRequest(ids=np.asarray(one, np.int32), params=params, n=self.n or 1)
            for one in (prompt if several else [prompt])
        ]
        return ServiceRequest(self.model, turns, bool(self.stream))


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


async def stream(body: CompletionRequest, pieces: AsyncIterator[Delta], tokenizer: Any) -> AsyncIterator[str]:
    """Yields the answer as server-sent events."""
    offsets: dict[int, int] = {}

    def choices(piece: Delta) -> Iterator[dict[str, Any]]:
        answer, logprobs = piece.answer, None
        if body.logprobs is not None:
            offset = offsets.get(piece.choice, 0)
            logprobs = _logprobs(tokenizer, piece.tokens, piece.logprobs, offset)
            offsets[piece.choice] = offset + sum(map(len, logprobs["tokens"]))
        finish = answer.finish if answer else None
        choice = {"index": piece.choice, "text": piece.content, "finish_reason": finish, "logprobs": logprobs}
        if body.return_token_ids:
            choice["token_ids"] = list(piece.tokens)
            if answer:
                choice |= {"prompt_token_ids": answer.prompt.tolist(), "version_spans": spans_of(answer.sequence.spans)}
        if answer or piece.content or logprobs or body.return_token_ids:
            yield choice

    head = {"id": new_id("cmpl-"), "object": "text_completion", "created": now_s(), "model": body.model}
    async for text in chunks(body, head, pieces, choices):
        yield text
