"""The parts of a replica that need no engine: deadlines, refusal after a failure, and the way of the bytes."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inference.engine import engine_args
from inference.replica import Replica
from inference.shipment import Shipment, in_memory_files
from trireme.config import Config
from trireme.errors import BadInput, RoomFailed, WeightsRefused
from trireme.types import SampleRequest, SamplingParams, WeightIdentity

IDENTITY = WeightIdentity(1, 0, "d")


def config(**inference: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"name": "m"},
            "orchestrator": {"batch_size": 2},
            "env": {"id": "sort"},
            "inference": {"sampling": {"max_tokens": 8}, **inference},
        }
    )


def replica(engine_dead: bool = False) -> Replica:
    made = Replica(config(), 0, None)
    made.engine = SimpleNamespace(errored=engine_dead)
    return made


def test_a_call_that_never_answers_has_a_deadline() -> None:
    with pytest.raises(RoomFailed, match="inference replica 0: no answer for update step 'pause' within 0 s"):
        asyncio.run(replica()._guarded("update step 'pause'", asyncio.sleep(3600), 0.01))


def test_a_dead_engine_is_seen_while_waiting() -> None:
    with pytest.raises(RoomFailed, match="its engine process died"):
        asyncio.run(replica(engine_dead=True)._guarded("anything", asyncio.sleep(3600), 3600))


def test_a_broken_replica_refuses_every_request_with_the_reason() -> None:
    broken = replica()
    broken.broken = WeightsRefused("tensor w arrived corrupted")
    requests = [SampleRequest(name, (1,), SamplingParams(max_tokens=1), name) for name in "ab"]

    outcomes: list[Any] = []

    async def sample() -> None:
        async for _, outcome in broken.sample(requests):
            outcomes.append(outcome)

    with pytest.raises(WeightsRefused, match="tensor w"):  # so the router uses it no more
        asyncio.run(sample())
    assert outcomes == [broken.broken, broken.broken]
    with pytest.raises(WeightsRefused, match="tensor w"):
        asyncio.run(broken.health())


def test_sampling_before_any_weights_is_refused() -> None:
    asked = SampleRequest("a", (1,), SamplingParams(max_tokens=1), "a")
    with pytest.raises(RoomFailed, match="before any weights were published"):
        asyncio.run(replica()._sample_one(asked))


def test_a_shipment_arrives_whole_is_private_and_leaves_nothing() -> None:
    buckets = [np.arange(200, dtype=np.uint8), np.full(5000, 7, np.uint8)]
    open_before = set(os.listdir("/proc/self/fd"))
    with in_memory_files(buckets) as paths:
        shipment = Shipment(IDENTITY, (), paths)
        received = shipment.open()
        received[0][3] = 99
        again = shipment.open()
    assert [a.tolist() for a in again] == [b.tolist() for b in buckets]
    assert received[0][3] == 99
    del received, again  # mappings hold descriptors of their own
    assert not any(os.path.exists(path) for path in paths)
    assert set(os.listdir("/proc/self/fd")) <= open_before


def test_engine_args_must_not_undo_what_the_replica_decides() -> None:
    with pytest.raises(BadInput, match="enable_chunked_prefill, logprobs_mode"):
        engine_args(config(engine_args={"logprobs_mode": "raw_logprobs", "enable_chunked_prefill": True}), on_cpu=True)
