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


def config(deterministic: bool = False, **inference: Any) -> Config:
    return Config.model_validate(
        {
            "deterministic": deterministic,
            "model": {"name": "m"},
            "orchestrator": {"batch_size": 2, "max_steps_off_policy": 0},
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
    answers: list[Any] = []

    async def sample() -> None:
        async for together in broken.sample(requests_of("a", "b")):
            answers.extend(outcome for _, outcome in together)

    with pytest.raises(WeightsRefused, match="tensor w"):  # so the router uses it no more
        asyncio.run(sample())
    assert answers == [broken.broken, broken.broken]
    with pytest.raises(WeightsRefused, match="tensor w"):
        asyncio.run(broken.health())


def test_sampling_before_any_weights_is_refused() -> None:
    asked = SampleRequest("a", (1,), SamplingParams(max_tokens=1), "a")
    with pytest.raises(RoomFailed, match="before any weights were published"):
        raise asyncio.run(outcomes(replica(), [asked]))[0]


class EngineOfRequests:
    """Stands still when told so; every request that entered is answered once it goes on. `calls` in their order."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.going = asyncio.Event()
        self.going.set()

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        await asyncio.sleep(0)
        self.going.clear()
        self.calls.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.going.set()
        self.calls.append("resume")

    async def add(self, name: str) -> Any:
        if name == "impossible":
            raise ValueError("too long")
        for _ in range(len(name)):  # the more letters, the longer the way
            await asyncio.sleep(0)
        self.calls.append(name)
        return SimpleNamespace(get=lambda: self._answer())

    async def _answer(self) -> Any:
        await self.going.wait()
        span = SimpleNamespace(version=str(IDENTITY), start=0, end=1)
        logprobs = [{7: SimpleNamespace(logprob=-1.0)}]
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=[7], logprobs=logprobs, weight_versions=[span], finish_reason="stop")]
        )


class SamplingReplica(Replica):
    """With that engine, which is spared vLLM's types."""

    engine: Any

    def __init__(self, deterministic: bool) -> None:
        super().__init__(config(deterministic), 0, None)
        self.engine, self.identity = EngineOfRequests(), IDENTITY

    async def _submit(self, request: SampleRequest, salt: str) -> Any:
        return await self.engine.add(request.request_id)


def requests_of(*names: str) -> list[SampleRequest]:
    return [SampleRequest(name, (1,), SamplingParams(max_tokens=1), name) for name in names]


async def outcomes(of: Replica, requests: list[SampleRequest]) -> list[Any]:
    found = dict([answer async for together in of.sample(requests) for answer in together])
    return [found[index] for index in sorted(found)]


def test_deterministic_requests_enter_in_order_while_the_engine_stands_still() -> None:
    names = ["longest", "long", "impossible", "l"]

    async def run() -> None:
        made = SamplingReplica(deterministic=True)
        answers = await outcomes(made, requests_of(*names))
        assert made.engine.calls == ["pause keep", "longest", "long", "l", "resume"]
        assert [isinstance(answer, RoomFailed) for answer in answers] == [name == "impossible" for name in names]
        assert "inference replica 0 could not sample request impossible: ValueError: too long" in str(answers[2])

    asyncio.run(run())


def test_requests_are_not_held_up_outside_deterministic_mode() -> None:
    async def run() -> None:
        made = SamplingReplica(deterministic=False)
        await outcomes(made, requests_of("b", "a"))
        assert made.engine.calls == ["b", "a"]

    asyncio.run(run())


def test_answers_that_finish_together_go_together() -> None:
    async def run() -> None:
        made = SamplingReplica(deterministic=False)
        made.engine.going.clear()
        answering = asyncio.create_task(together(made))
        await asyncio.sleep(0.01)
        made.engine.going.set()
        assert [[index for index, _ in group] for group in await answering] == [[0, 1, 2]]

    async def together(made: Replica) -> list[Any]:
        return [group async for group in made.sample(requests_of("a", "b", "c"))]

    asyncio.run(run())


def test_nobody_lets_an_engine_go_on_that_takes_weights() -> None:
    """Sampling that begins during an update waits for its end; after a refused update it fails, and nothing resumes."""

    async def run() -> None:
        made = SamplingReplica(deterministic=True)
        await made.pausing.acquire()  # as an update does
        begun = asyncio.create_task(outcomes(made, requests_of("a")))
        refused = asyncio.create_task(outcomes(made, requests_of("b")))
        for _ in range(20):
            await asyncio.sleep(0)
        assert made.engine.calls == []
        made.pausing.release()
        await begun
        await refused
        assert made.engine.calls == ["pause keep", "a", "resume", "pause keep", "b", "resume"]
        made.broken = WeightsRefused("canary")
        with pytest.raises(WeightsRefused, match="canary"):
            await outcomes(made, requests_of("c"))
        assert "c" not in made.engine.calls
        assert made.engine.calls.count("resume") == 2

    asyncio.run(run())


def test_the_prefix_cache_is_off_in_deterministic_mode_and_stays_off() -> None:
    assert engine_args(config(deterministic=True), on_cpu=True)["enable_prefix_caching"] is False
    assert "enable_prefix_caching" not in engine_args(config(), on_cpu=True)
    with pytest.raises(BadInput, match="enable_prefix_caching"):
        engine_args(config(deterministic=True, engine_args={"enable_prefix_caching": True}), on_cpu=True)


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
