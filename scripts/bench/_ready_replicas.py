"""A sampler whose replicas have their answers ready, and notes on the process that uses it: how long its event loop
stood still, and what memory it has."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil
from turns import answers

from trireme.core.sampler import ReplicaStats
from trireme.core.transport import Offer, Session
from trireme.core.types import SampledSequence, SampleRequest, WeightIdentity
from trireme.core.weights import Drift, PublishedWeights, UpdateReport

AT_ONCE = 64
"""Answers that are given in one turn of the event loop: replicas do not finish thousands of requests together."""
TICK_S = 0.002
GAP_S = 0.02
"""Gaps between two ticks are noted from here on."""


class ReadySampler:
    """Implements what an orchestrator without failing replicas calls of `trireme.core.sampler.Sampler`. Writes `notes`,
    a JSON object per line, with the time as `time.monotonic` gives it, which all processes of a machine share."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes.open("a", buffering=1)
        self._waiting: deque[asyncio.Future[SampledSequence]] = deque()
        self._answers: list[SampledSequence] = []
        self._version: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._given = 0

    async def sample(self, request: SampleRequest) -> SampledSequence:
        future: asyncio.Future[SampledSequence] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return await future

    async def update_weights(self, weights: PublishedWeights) -> list[UpdateReport]:
        self._answers, self._version = answers(weights.identity), weights.identity.version
        if not self._tasks:
            self._note("first", given=0)
            self._tasks = [asyncio.create_task(work) for work in (self._answer(), self._tick())]
        return [UpdateReport(0, weights.identity, Drift(0.0, 0.0), 0, 0.0)]

    async def offer(self, offer: Offer) -> Session:
        return Session(offer.attempt, 1, {})

    def acknowledged(self) -> dict[int, int]:
        return {} if self._version is None else {0: self._version}

    async def stats(self) -> dict[int, ReplicaStats]:
        return {0: ReplicaStats(running=0, waiting=0, kv_used=0.0, preemptions=0)}

    def roll_back(self, known: Collection[WeightIdentity]) -> None:
        """Has nothing in flight when a state is loaded."""

    async def _answer(self) -> None:
        while True:
            there = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
            for future in there:
                if not future.done():
                    future.set_result(self._answers[self._given % len(self._answers)])
                self._given += 1
            await asyncio.sleep(0 if there else TICK_S)

    async def _tick(self) -> None:
        """Notes how long the loop did nothing else than what it was in the middle of, and for how long its thread
        computed meanwhile."""
        known = 0
        while True:
            before, cpu_before = time.monotonic(), time.thread_time()
            await asyncio.sleep(TICK_S)
            gap_s, cpu_s = time.monotonic() - before - TICK_S, time.thread_time() - cpu_before
            if gap_s > GAP_S:
                self._note("gap", gap_s=gap_s, gap_cpu_s=cpu_s)
            if self._given != known and not self._waiting:
                self._note("answered", given=self._given)
                known = self._given

    def _note(self, what: str, **values: Any) -> None:
        process = psutil.Process()
        times = process.cpu_times()
        note = {
            "what": what,
            "at": time.monotonic(),
            "rss": process.memory_info().rss,
            "cpu_s": times.user + times.system,
        }
        self._notes.write(json.dumps(note | values) + "\n")
