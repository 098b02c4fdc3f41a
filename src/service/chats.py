"""The replicas as the clients of a service may use them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from service.asked import RequestRefused
from service.front import ChatSampler, Told
from trireme.core.types import SampledSequence, SampleRequest
from trireme.process.cpu_meter import CpuMeter


class BoundedSampler:
    """Marks each request as a chat, with what it has cost this process, so that the engines bound it by
    `service.share`; and ends it after `answer_s` seconds."""

    def __init__(self, sampler: ChatSampler, answer_s: float, share: float) -> None:
        self._sampler, self._answer_s, self._share = sampler, answer_s, share
        self._costs = CpuMeter()

    async def sample(self, request: SampleRequest, told: Told | None = None) -> SampledSequence:
        """Samples one sequence. Raises RequestRefused when it takes too long, and what the sampler raises."""
        chat = replace(request, purpose="chat", cpu_s=self._costs.take())
        try:
            async with asyncio.timeout(self._answer_s) as limit:
                return await self._sampler.sample(chat, told)
        except TimeoutError:
            if not limit.expired():
                raise
            raise RequestRefused(
                f"the answer was not whole after {self._answer_s:g} s (inference.answer_s): all chats together have at "
                f"most {self._share:g} of the time of the replicas' engines (service.share); expected an answer of "
                "fewer tokens: lower max_tokens, or set --service.share or --inference.answer-s higher",
                status=504,
                code="answer_timeout",
            ) from None
