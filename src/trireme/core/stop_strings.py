"""Cuts answers at stop strings.

An engine that has the tokenizer stops by itself. These functions serve every sampler, and answers that two replicas
have sampled: a stop string may lie across the two parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from trireme.core.tokenizer import Decode
from trireme.core.types import SampledSequence


def first_of(strings: Sequence[str], text: str) -> int | None:
    """Returns the index in `text` at which the earliest of `strings` begins; None if `text` holds none of them."""
    places = [place for place in map(text.find, strings) if place >= 0]
    return min(places, default=None)


def cut(sampled: SampledSequence, strings: Sequence[str], decode: Decode) -> SampledSequence:
    """Returns `sampled` cut after the first token that completes one of `strings`. `decode` turns tokens into text. The
    result equals the answer of a sampler that stops there, because later tokens had no influence on earlier ones."""
    tokens = sampled.tokens.tolist()

    def complete(end: int) -> bool:
        return first_of(strings, decode(tokens[:end])) is not None

    if not complete(len(tokens)):
        return sampled
    end = bisect_left(range(len(tokens)), True, key=complete)
    return replace(
        sampled,
        tokens=sampled.tokens[:end],
        logprobs=sampled.logprobs[:end],
        stop_reason="stop",
        spans=tuple(replace(span, end=min(span.end, end)) for span in sampled.spans if span.start < end),
    )
