"""Samples chats: all requests of the service's clients. Engines take the run's requests first."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from service.requests import RequestRefused
from trireme.core.sampler import OnProgress, Sample
from trireme.core.types import SampledSequence, SampleRequest


def bounded(sample: Sample, answer_s: float) -> Sample:
    """Returns a function that samples answers for clients with the function `sample`. It marks each request as a chat,
    so that engines take the run's own requests first. Raises RequestRefused (504) if a sequence takes longer than
    `answer_s` seconds, and errors of `sample`."""

    async def sample_chat(request: SampleRequest, on_progress: OnProgress | None = None, /) -> SampledSequence:
        chat = replace(request, chat=True)
        try:
            async with asyncio.timeout(answer_s) as limit:
                return await sample(chat, on_progress)
        except TimeoutError:
            if not limit.expired():
                raise
            raise RequestRefused(
                f"the answer was not whole after {answer_s:g} s (inference.answer_s), as the run's requests go first; "
                "expected an answer of fewer tokens: lower max_tokens, or set --inference.answer-s higher",
                status=504,
                code="answer_timeout",
            ) from None

    return sample_chat
