"""What the fault point `inference.answer` can make of a replica's answers: those of one that lives and is broken.

`late` gives them LATE_S seconds after they were sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from trireme.core.types import SampledSequence, WeightIdentity

LATE_S = 2.0
BEYOND = 2**20
"""Larger than any vocabulary."""


async def made_wrong(answer: SampledSequence, action: str) -> SampledSequence:
    """Raises KeyError for a word that is none of these: a fault that never comes would be a test that cannot fail."""
    if action == "late":
        await asyncio.sleep(LATE_S)
        return answer
    return WRONG[action](answer)


def garbage(answer: SampledSequence) -> SampledSequence:
    """Tokens that no model has."""
    return replace(answer, tokens=answer.tokens + BEYOND)


def nan(answer: SampledSequence) -> SampledSequence:
    return replace(answer, logprobs=answer.logprobs * np.float32(np.nan))


def stranger(answer: SampledSequence) -> SampledSequence:
    """Tokens of weights that nobody ever published."""
    spans = [replace(span, identity=WeightIdentity(7, span.identity.version, "0" * 32)) for span in answer.spans]
    return replace(answer, spans=tuple(spans))


WRONG: dict[str, Callable[[SampledSequence], SampledSequence]] = {"garbage": garbage, "nan": nan, "stranger": stranger}
