"""Passes requests to the replicas, and knows how many of them wait for an answer."""

from __future__ import annotations

import asyncio

from trireme.core.sampler import OnProgress, Sampler
from trireme.core.types import SampledSequence, SampleRequest


class Requests:
    """Passes the requests of training and of evaluations to `sampler`. Counts the requests in flight, and the seconds
    without a request in flight, from `start` on."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._in_flight = 0
        self._evaluating = 0
        self._since = 0.0
        self._idle = 0.0

    def start(self) -> None:
        """Begins to count idle seconds."""
        self._since = _now()

    async def sample(self, request: SampleRequest, *on_progress: OnProgress) -> SampledSequence:
        self._note_idle()
        self._in_flight += 1
        try:
            return await self._sampler.sample(request, *on_progress)
        finally:
            self._in_flight -= 1
            self._since = _now()

    async def sample_to_evaluate(self, request: SampleRequest, *on_progress: OnProgress) -> SampledSequence:
        self._evaluating += 1
        try:
            return await self.sample(request, *on_progress)
        finally:
            self._evaluating -= 1

    @property
    def in_training(self) -> int:
        """The number of training requests that wait for an answer."""
        return self._in_flight - self._evaluating

    def take_idle(self) -> float:
        """Returns the seconds without a request in flight, counted since the last call."""
        self._note_idle()
        idle = self._idle
        self._idle = 0.0
        return idle

    def _note_idle(self) -> None:
        now = _now()
        if not self._in_flight:
            self._idle += now - self._since
        self._since = now


def _now() -> float:
    return asyncio.get_running_loop().time()
