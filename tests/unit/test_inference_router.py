"""The router, in front of replicas that are plain objects: where requests go, and what happens when a replica fails."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.engine import check_spans
from inference.router import Router
from trireme.errors import RoomFailed, TriremeError, WeightsRefused
from trireme.protocols import ReplicaLoad
from trireme.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity
from trireme.weights import Canary, PublishedWeights, UpdateReport

WEIGHTS = PublishedWeights(
    WeightIdentity(1, 3, "d"), (), (), Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), 1e-4)
)


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    return run


def request(name: str, key: str | None = None) -> SampleRequest:
    return SampleRequest(name, (1, 2), SamplingParams(max_tokens=4), key or name)


def answer(of: SampleRequest) -> SampledSequence:
    tokens = np.frombuffer(of.request_id.encode(), np.uint8).astype(np.int32)
    return SampledSequence(tokens, np.zeros(len(tokens), np.float32), "stop", ())


class FakeReplica:
    """Answers a request when the test says so; `groups` are the calls that reached it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.groups: list[list[str]] = []
        self.aborted: list[str] = []
        self.go = asyncio.Event()
        self.failure: TriremeError | None = None
        self.refused: dict[str, TriremeError] = {}
        self.update = asyncio.get_running_loop().create_future()
        self.loaded: ReplicaLoad | TriremeError = ReplicaLoad(0, 0, 0.0, 0)

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, SampledSequence | TriremeError]]:
        self.groups.append([r.request_id for r in requests])
        await self.go.wait()
        if self.failure:
            raise self.failure
        for index in reversed(range(len(requests))):
            if requests[index].request_id not in self.aborted:
                yield index, self.refused.get(requests[index].request_id) or answer(requests[index])

    async def update_weights(self, published: PublishedWeights) -> UpdateReport:
        return await self.update

    async def load(self) -> ReplicaLoad:
        if isinstance(self.loaded, TriremeError):
            raise self.loaded
        return self.loaded

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids


def report(replica: int) -> UpdateReport:
    return UpdateReport(replica, WEIGHTS.identity, 0.0, 0, 0.0)


async def turns(n: int = 5) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def fleet(n: int, fixed: bool = False) -> tuple[Router, list[FakeReplica]]:
    fakes = [FakeReplica(f"replica {i}") for i in range(n)]
    return Router(dict(enumerate(fakes)), fixed=fixed), fakes


@in_loop
async def test_requests_of_one_turn_travel_together_and_to_the_least_loaded() -> None:
    router, (first, second) = fleet(2)
    tasks = [asyncio.create_task(router.sample(request(f"r{i}"))) for i in range(4)]
    await turns()
    late = asyncio.create_task(router.sample(request("late")))
    await turns()
    assert first.groups == [["r0", "r2"], ["late"]]
    assert second.groups == [["r1", "r3"]]
    first.go.set()
    second.go.set()
    answers = await asyncio.gather(*tasks, late)
    assert [bytes(a.tokens.astype(np.uint8)).decode() for a in answers] == ["r0", "r1", "r2", "r3", "late"]


@in_loop
async def test_equal_route_keys_stay_on_one_replica() -> None:
    router, fakes = fleet(2)
    for fake in fakes:
        fake.go.set()
    await router.sample(request("a0", "a"))
    busy = [asyncio.create_task(router.sample(request(f"a{i}", "a"))) for i in range(1, 4)]
    other = asyncio.create_task(router.sample(request("b0", "b")))
    await asyncio.gather(*busy, other)
    assert fakes[0].groups == [["a0"], ["a1", "a2", "a3"]]
    assert fakes[1].groups == [["b0"]]


async def wave(router: Router, keys: Sequence[str]) -> None:
    """One turn's requests, in order, and their answers."""
    await asyncio.gather(*[router.sample(request(f"{key}{i}", key)) for i, key in enumerate(keys)])


@given(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12), max_size=4), st.integers(1, 4))
def test_fixed_routes_follow_from_the_wave_alone(earlier: list[list[str]], replicas: int) -> None:
    """A router with a past sends a wave where a new one does: as after a resume. Equal keys still travel together."""
    keys = [*"fdbacebd", *"ffga"]

    @in_loop
    async def run() -> None:
        (router, fakes), (fresh, expected) = fleet(replicas, fixed=True), fleet(replicas, fixed=True)
        for fake in (*fakes, *expected):
            fake.go.set()
        for past in earlier:
            await wave(router, past)
        for fake in fakes:
            fake.groups.clear()
        await wave(router, keys)
        await wave(fresh, keys)
        assert [fake.groups for fake in fakes] == [fake.groups for fake in expected]
        keys_at = [{name[0] for group in fake.groups for name in group} for fake in fakes]
        assert sorted(key for at in keys_at for key in at) == sorted(set(keys))

    run()


@in_loop
async def test_a_failed_replica_fails_its_requests_only_and_is_used_no_more() -> None:
    router, (first, second) = fleet(2)
    tasks = [asyncio.create_task(router.sample(request(f"r{i}"))) for i in range(2)]
    await turns()
    first.failure = RoomFailed("replica 0 died; its log: x")
    first.go.set()
    second.go.set()
    with pytest.raises(RoomFailed, match="replica 0 died; its log: x"):
        await tasks[0]
    await tasks[1]
    await router.sample(request("r0"))  # its key was on the failed replica
    assert second.groups == [["r1"], ["r0"]]
    second.failure = RoomFailed("replica 1 died")
    with pytest.raises(RoomFailed, match="replica 1 died"):
        await router.sample(request("r2"))
    with pytest.raises(RoomFailed, match=r"no inference replica is left.*replica 0 died.*replica 1 died"):
        await router.sample(request("r3"))


@in_loop
async def test_the_error_of_one_request_is_its_own() -> None:
    router, (only,) = fleet(1)
    only.refused["bad"] = RoomFailed("prompt too long")
    only.go.set()
    bad, good = await asyncio.gather(
        router.sample(request("bad")), router.sample(request("good")), return_exceptions=True
    )
    assert isinstance(bad, RoomFailed)
    assert isinstance(good, SampledSequence)


@in_loop
async def test_a_cancelled_caller_aborts_its_request() -> None:
    router, (only,) = fleet(1)
    kept, cancelled = (asyncio.create_task(router.sample(request(name))) for name in ("kept", "cancelled"))
    await turns()
    cancelled.cancel()
    await turns()
    assert only.aborted == ["cancelled"]
    only.go.set()
    await kept
    assert cancelled.cancelled()


@in_loop
async def test_a_request_cancelled_before_it_left_is_never_sent() -> None:
    router, (only,) = fleet(1)
    only.go.set()
    cancelled = asyncio.create_task(router.sample(request("cancelled")))
    await asyncio.sleep(0)  # now it is queued; it would leave in the next turn
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await router.sample(request("kept"))
    assert only.groups == [["kept"]]
    assert router._in_flight == {0: 0}


@in_loop
async def test_an_acknowledgement_counts_the_moment_it_arrives() -> None:
    router, (first, second) = fleet(2)
    assert router.acknowledged() == {}
    update = asyncio.create_task(router.update_weights(WEIGHTS))
    await turns()
    second.update.set_result(report(1))
    await turns()
    assert router.acknowledged() == {1: 3}
    first.update.set_result(report(0))
    assert await update == [report(0), report(1)]
    assert router.acknowledged() == {0: 3, 1: 3}


@in_loop
async def test_a_refused_update_is_raised_after_the_others_finished() -> None:
    router, (first, second) = fleet(2)
    first.update.set_exception(WeightsRefused("replica 0: tensor w was corrupted"))
    update = asyncio.create_task(router.update_weights(WEIGHTS))
    await turns()
    assert not update.done()
    second.update.set_result(report(1))
    with pytest.raises(WeightsRefused, match="replica 0: tensor w"):
        await update
    assert router.acknowledged() == {1: 3}


@in_loop
async def test_the_load_of_all_that_live() -> None:
    router, (first, second) = fleet(2)
    first.loaded = ReplicaLoad(3, 1, 0.5, 0)
    assert await router.load() == {0: first.loaded, 1: second.loaded}
    first.loaded = RoomFailed("replica 0 died")
    assert await router.load() == {1: second.loaded}
    first.loaded = second.loaded
    assert await router.load() == {1: second.loaded}  # used no more
    second.loaded = RoomFailed("replica 1 died")
    with pytest.raises(RoomFailed, match=r"no inference replica is left.*replica 0 died.*replica 1 died"):
        await router.load()


def test_spans_must_cover_every_token() -> None:
    def spans(*edges: tuple[int, int]) -> tuple[VersionSpan, ...]:
        return tuple(VersionSpan(WeightIdentity(1, i, "d"), *edge) for i, edge in enumerate(edges))

    check_spans("r", spans((0, 2), (2, 5)), 5)
    for wrong in (spans((0, 2), (3, 5)), spans((0, 3), (2, 5)), spans((0, 4)), spans((1, 5)), spans()):
        with pytest.raises(RoomFailed, match="do not cover"):
            check_spans("r", wrong, 5)
