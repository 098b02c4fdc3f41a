"""Answers of a broken replica, for the fault point `inference.answer`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from trireme.core.types import SampledSequence

LATE_S = 2.0
"""Delay of the answers that the fault point `inference.answer` makes late."""
BEYOND = 2**20
"""Larger than any vocabulary."""


async def wrong_answer(answer: SampledSequence, action: str) -> SampledSequence:
    """Returns `answer` spoilt as `action` says: "late", "garbage" (tokens), "nan" (logprobs) or "stranger" (weights).
    Raises ValueError for an unknown action: a test whose fault never happens proves nothing."""
    match action:
        case "late":
            await asyncio.sleep(LATE_S)
            return answer
        case "garbage":  # tokens that no model has
            return replace(answer, tokens=answer.tokens + BEYOND)
        case "nan":
            return replace(answer, logprobs=answer.logprobs * np.float32(np.nan))
        case "stranger":  # weights that were never published
            spans = [replace(span, identity=replace(span.identity, attempt=7)) for span in answer.spans]
            return replace(answer, spans=tuple(spans))
    raise ValueError(f"fault point inference.answer: unknown action {action!r}; expected late, garbage, nan, stranger")
