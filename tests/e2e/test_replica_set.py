"""The replica set as an actor: its driver's handle, and a router in another process that reads its tables."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replica_support
from config_support import small
from ray import cloudpickle
from replica_support import IdleReplica, weights

from inference.handover import Outcome
from inference.replica_set import handle as handle_module
from inference.replica_set.handle import ReplicaSetHandle
from inference.router import Router
from trireme.core.errors import RoomFailed
from trireme.core.transport import Offer, Session
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan
from trireme.core.weights import PublishedWeights, UpdateReport
from trireme.process import waits

pytestmark = pytest.mark.usefixtures("ray_cluster")
WAIT_S = 60.0
SLOW_S = 5.0
SLOW_VERSION = 4
"""A set has a successor in less. This version is taken so slowly."""


class Replica(IdleReplica):
    """Has the weights of version 3 in every process; `fails` when it is asked to sample."""

    def __init__(self, index: int, fails: bool = False) -> None:
        self.name, self.index, self.fails = f"replica {index}", index, fails

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        if self.fails:
            raise RoomFailed(f"{self.name} died")
        if requests[0].request_id.startswith("slow"):
            await asyncio.sleep(SLOW_S)
        for number, _ in enumerate(requests):
            spans = (VersionSpan(weights(3).identity, 0, 1),)
            yield number, SampledSequence(np.full(1, self.index, np.int32), np.zeros(1, np.float32), "stop", spans)

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        if published.identity.version == SLOW_VERSION:
            await asyncio.sleep(SLOW_S)
        return await super().load_weights(published)


class Offered:
    """Answers for replicas 0 and 4, but never about version 7."""

    def __init__(self, *_: object, **__: object) -> None:
        """Stands for a replica set."""

    async def start(self, _log_dir: Path) -> None: ...

    async def offer(self, offer: Offer) -> Session:
        if offer.version == 7:
            await asyncio.Event().wait()
        if offer.version == 8:
            raise ArithmeticError("a bug")
        return Session(offer.attempt, 1, {0: 0, 4: 0})


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], ReplicaSetHandle]]:
    by_value = (replica_support, sys.modules[__name__])
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    started: list[ReplicaSetHandle] = []

    def start() -> ReplicaSetHandle:
        started.append(ReplicaSetHandle(small(), tmp_path))
        refs, owners = started[-1].ready_refs()
        waits.get_all(refs, owners=owners, timeout_s=WAIT_S)
        return started[-1]

    yield start
    for group in started:
        group.stop()
    for module in by_value:
        cloudpickle.unregister_pickle_by_value(module)


async def answer(ref: Any) -> Any:
    return await waits.get_async(ref, owner="the replica set", timeout_s=WAIT_S)


async def sampled_by(router: Router, name: str) -> int:
    request = SampleRequest(name, np.zeros(1, np.int32), SamplingParams(max_tokens=1), name)
    return int((await asyncio.wait_for(router.sample(request), WAIT_S)).tokens[0])


def test_a_router_samples_with_the_replicas_of_the_newest_table(start: Callable[[], ReplicaSetHandle]) -> None:
    replicas = start()
    actor = replicas.actor

    async def run() -> None:
        (pid,) = (await answer(actor.heartbeat.remote())).pids
        router = Router(replicas.source)
        for index in range(2):
            await answer(actor.join.remote(index, Replica(index, fails=index == 0)))
        replicas.update(weights(3))
        reports = await asyncio.wait_for(router.updated(weights(3).identity), WAIT_S)
        assert [report.replica for report in reports] == [0, 1]
        assert router.acknowledged() == {0: 3, 1: 3}, "its table is that of the update"
        assert [await sampled_by(router, name) for name in ("a", "b")] == [1, 1]
        table = await answer(actor.table.remote((0, 0), 0.0))
        assert str(table.departed[0].reason) == "replica 0 died"
        await answer(actor.join.remote(0, Replica(0)))
        await answer(actor.leave.remote(1, "it is dead"))
        while set(router.acknowledged()) != {0}:  # noqa: ASYNC110  its table comes
            await asyncio.sleep(0.01)
        assert await sampled_by(router, "c") == 0
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(1.0)
        assert await sampled_by(router, "d") == 0, "the last table stays"
        with pytest.raises(RoomFailed, match=r"replica set .* died"):
            await replicas.source.table((0, 0), 0.0)

    asyncio.run(run())


def test_requests_outlive_the_set_and_the_next_incarnation_knows_the_weights(
    start: Callable[[], ReplicaSetHandle],
) -> None:
    """It is killed twice: with 64 requests in flight, and in the middle of an update."""
    replicas = start()

    async def killed(generations: dict[int, tuple[int, int]]) -> None:
        (pid,) = (await answer(replicas.actor.heartbeat.remote())).pids
        os.kill(pid, signal.SIGKILL)
        await answer(replicas.begin_again({index: Replica(index) for index in generations}, generations))

    async def run() -> None:
        router, generations = Router(replicas.source), {0: (0, 1), 1: (0, 2)}
        replicas.followers.append(router.follow)
        for index, generation in generations.items():
            await answer(replicas.actor.join.remote(index, Replica(index), generation))
        replicas.update(weights(3))
        await asyncio.wait_for(router.updated(weights(3).identity), WAIT_S)
        running = [asyncio.create_task(sampled_by(router, f"slow {number}")) for number in range(64)]
        await asyncio.sleep(0.5)
        targets = dict(router._targets)
        await killed(generations)
        assert {await task for task in running} == {0, 1}
        assert router._targets == targets, "the requests went on where they were"
        while router.acknowledged() != {0: 3, 1: 3}:  # noqa: ASYNC110  the update is repeated
            await asyncio.sleep(0.01)
        replicas.update(weights(SLOW_VERSION))
        await asyncio.sleep(0.5)
        await killed(generations)
        reports = await asyncio.wait_for(router.updated(weights(SLOW_VERSION).identity), WAIT_S)
        assert [report.replica for report in reports] == [0, 1]
        assert router.acknowledged() == {0: SLOW_VERSION, 1: SLOW_VERSION}
        assert replicas.incarnation == 3

    asyncio.run(run())


def test_the_driver_waits_for_an_offer_no_longer_than_its_deadline(
    start: Callable[[], ReplicaSetHandle], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It publishes without a session, and in groups of which no replica of an unanswered offer is a member."""
    monkeypatch.setattr(handle_module, "ANSWER_S", 0.5)
    monkeypatch.setattr(handle_module, "ReplicaSet", Offered)
    replicas = start()

    def offer(version: int, timeout_s: float = 300.0) -> Session:
        return replicas.offer(Offer(2, version, (64,), ("here",), timeout_s))

    assert [offer(5), offer(6)] == [Session(2, 1, {0: 0, 4: 0})] * 2
    assert offer(7, timeout_s=1.0) == Session(2, 2, {})
    message = caplog.messages[-1]
    assert message.startswith(
        "waited 1 s for replica set (which replicas are ready for new weights) and got no answer; "
    )
    assert message.endswith("; version 7 is sent to no replica: they fetch it")
    assert offer(9) == Session(2, 3, {0: 0, 4: 0})
    with pytest.raises(RoomFailed, match=r"replica set .* raised ArithmeticError: a bug"):
        offer(8)
