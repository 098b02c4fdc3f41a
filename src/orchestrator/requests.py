"""Passes requests to the replicas, and knows how many of them wait for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trireme.core.sampler import OnProgress, Sampler
from trireme.core.types import SampledSequence, SampleRequest


class IdleClock:
    """Adds up the seconds without a request in flight, from `begin` on. Make each request within `with clock:`, where
    `clock` is an object of this class. `now` returns the time in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.in_flight = 0
        self._since = self._idle = 0.0

    def begin(self) -> None:
        """Begins to count."""
        self._since = self._now()
        self._idle = 0.0

    def __enter__(self) -> None:
        if not self.in_flight:
            self._idle += self._now() - self._since
        self.in_flight += 1

    def __exit__(self, *error: object) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._since = self._now()

    def take(self) -> float:
        """Returns the seconds without a request in flight, counted since the last call or since `begin`."""
        if not self.in_flight:
            now = self._now()
            self._idle += now - self._since
            self._since = now
        idle = self._idle
        self._idle = 0.0
        return idle


class Requests:
    """Passes the requests of training and of evaluations to `sampler`. Counts the requests in flight, and the seconds
    without a request in flight."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._idle = IdleClock(lambda: asyncio.get_running_loop().time())
        self._evaluating = 0

    def start(self) -> None:
        """Begins to count idle seconds."""
        self._idle.begin()

    async def sample(self, request: SampleRequest, *on_progress: OnProgress) -> SampledSequence:
        with self._idle:
            return await self._sampler.sample(request, *on_progress)

    async def sample_to_evaluate(self, request: SampleRequest, *on_progress: OnProgress) -> SampledSequence:
        self._evaluating += 1
        try:
            return await self.sample(request, *on_progress)
        finally:
            self._evaluating -= 1

    @property
    def in_training(self) -> int:
        """The number of training requests that wait for an answer."""
        return self._idle.in_flight - self._evaluating

    def take_idle(self) -> float:
        """Returns the seconds without a request in flight, counted since the last call."""
        return self._idle.take()
