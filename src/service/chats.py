"""Samples chats: all requests of the service's clients. Engines take the run's requests first."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from service.requests import RequestRefused
from trireme.core.sampler import OnProgress, Sample
from trireme.core.types import SampledSequence, SampleRequest


class BoundedSampler:
    """Samples answers for clients with the function `sample`. Marks each request as a chat, so that engines take the
    run's own requests first. Ends a request after `answer_s` seconds."""

    def __init__(self, sample: Sample, answer_s: float) -> None:
        self._sample = sample
        self._answer_s = answer_s

    async def sample(self, request: SampleRequest, on_progress: OnProgress | None = None, /) -> SampledSequence:
        """Samples one sequence. Raises RequestRefused (504) if the sequence takes longer than `answer_s` seconds, and
        errors of the function that samples."""
        chat = replace(request, chat=True)
        try:
            async with asyncio.timeout(self._answer_s) as limit:
                return await self._sample(chat, on_progress)
        except TimeoutError:
            if not limit.expired():
                raise
            raise RequestRefused(
                f"the answer was not whole after {self._answer_s:g} s (inference.answer_s), as the run's requests go "
                "first; expected an answer of fewer tokens: lower max_tokens, or set --inference.answer-s higher",
                status=504,
                code="answer_timeout",
            ) from None
