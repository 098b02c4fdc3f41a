"""Strings that end an answer: where in its tokens, and the answer up to there.

An engine that has the tokenizer stops by itself. What follows holds for every sampler, and for an answer that two
replicas have sampled, between whose parts a string may lie.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from trireme.core.tokenizer import Decode
from trireme.core.types import SampledSequence


def first_of(strings: Sequence[str], text: str) -> int | None:
    """Where the first of `strings` begins in `text`; none if it holds none of them."""
    places = [place for place in map(text.find, strings) if place >= 0]
    return min(places, default=None)


def tokens_until(strings: Sequence[str], tokens: Sequence[int], decode: Decode) -> int | None:
    """Number of `tokens` up to the one that completes one of `strings` in their text; none if they hold none."""

    def complete(end: int) -> bool:
        return first_of(strings, decode(tokens[:end])) is not None

    return bisect_left(range(len(tokens)), True, key=complete) if complete(len(tokens)) else None


def cut(sampled: SampledSequence, strings: Sequence[str], decode: Decode) -> SampledSequence:
    """What was sampled, up to the token that completes one of `strings`. What comes after it had no influence on it, so
    the rest is what a sampler gives that stops there."""
    end = tokens_until(strings, sampled.tokens.tolist(), decode)
    if end is None:
        return sampled
    return replace(
        sampled,
        tokens=sampled.tokens[:end],
        logprobs=sampled.logprobs[:end],
        stop_reason="stop",
        spans=tuple(replace(span, end=min(span.end, end)) for span in sampled.spans if span.start < end),
    )
