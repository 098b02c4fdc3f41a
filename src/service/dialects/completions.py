"""OpenAI's `/v1/completions`: prompts as text or token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from service.dialects.chat import OpenAIBody
from service.dialects.wire import Many, TokenId
from service.requests import Delta, ServiceAnswer, TurnRequest
from trireme.core.finite_json import JsonObject
from trireme.core.tokenizer import Tokenizer

DEFAULT_TOKENS = 16
"""The limit of tokens when the request leaves out `max_tokens`, as OpenAI has it."""
MOST_PROMPTS = 1024


class CompletionRequest(OpenAIBody):
    """The body of a request to `/v1/completions`."""

    prompt: (
        str
        | Annotated[Many[TokenId], Field(min_length=1)]
        | Annotated[Many[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[Many[Many[TokenId]], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Literal[0] | None = None

    def turns(self) -> Sequence[TurnRequest]:
        params = self.openai_params(self.max_tokens or DEFAULT_TOKENS)
        prompt = self.prompt
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return [
            TurnRequest(text=one, params=params, n=self.n or 1)
            if isinstance(one, str)
            else TurnRequest(ids=np.asarray(one, np.int32), params=params, n=self.n or 1)
            for one in (prompt if several else [prompt])
        ]

    # ---- answers

    def whole(self, answers: Sequence[ServiceAnswer], tokenizer: Tokenizer) -> JsonObject:
        choices = [self._choice(answer, answer, 0, tokenizer) for answer in answers]
        return {**self.head("cmpl-", "text_completion"), "choices": choices, "usage": self.usage(answers)}

    def _choice(
        self, piece: Delta | ServiceAnswer, answer: ServiceAnswer | None, offset: int, tokenizer: Tokenizer
    ) -> JsonObject:
        choice: dict[str, Any] = {"index": piece.choice, "text": piece.content, "logprobs": None}
        choice["finish_reason"] = answer.finish if answer else None
        if self.logprobs is not None:
            choice["logprobs"] = _logprobs(tokenizer, piece, offset)
        if self.return_token_ids:
            choice["token_ids"] = list(piece.tokens)
        if answer:
            choice |= self.ids_of(answer)
        return choice

    async def events(self, pieces: AsyncIterator[Delta], tokenizer: Tokenizer) -> AsyncIterator[str]:
        offsets: Counter[int] = Counter()

        def choices(piece: Delta) -> Iterator[JsonObject]:
            choice = self._choice(piece, piece.answer, offsets[piece.choice], tokenizer)
            logprobs = choice["logprobs"]
            if isinstance(logprobs, dict):
                offsets[piece.choice] += sum(map(len, logprobs["tokens"]))
            if piece.answer or piece.content or logprobs or self.return_token_ids:
                yield choice

        async for text in self.chunks(self.head("cmpl-", "text_completion"), pieces, choices):
            yield text


def _logprobs(tokenizer: Tokenizer, piece: Delta | ServiceAnswer, offset: int) -> JsonObject:
    texts = [str(tokenizer.decode([token])) for token in piece.tokens]
    *offsets, _end = accumulate(map(len, texts), initial=offset)
    return {
        "tokens": texts,
        "token_logprobs": list(piece.logprobs),
        "text_offset": offsets,
        "top_logprobs": None,
    }
