"""A replica's part in broadcasts: whom it believes, what it maps, when it fetches instead."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from waiting import wait_for_tasks

from inference.mapping import ON_DEVICE, Landing
from inference.session import Broadcasts
from trireme.core.errors import RoomFailed
from trireme.core.finite_json import to_json
from trireme.core.transport import Offer, Session
from trireme.core.types import WeightIdentity
from trireme.core.weights import EXACT, Canary, PublishedWeights, WeightsManifest

OFFER = Offer(attempt=1, version=5, sizes=(64, 0, 128), endpoints_R=(None,), timeout_s=30.0)
SESSION = Session(1, 0, {0: 0, 2: 0})
SENT = [np.arange(64, dtype=np.uint8), np.zeros(0, np.uint8), np.full(128, 7, np.uint8)]


class Engine:
    """Stands for the engine's rank 0: writes to the pipe what a test tells it, and keeps what arrived in a file."""

    def __init__(self) -> None:
        self.offered: list[int] = []
        self.serial, self.pipe = 0, ""
        self.landing = Landing()
        regions = self.landing.copy(SENT)
        self.arrival = regions[0].path

    async def start(self, offer: Offer, serial: int, pipe: str) -> None:
        self.offered.append(offer.version)
        self.serial, self.pipe = serial, pipe
        self.say(ready=True)

    def say(self, serial: int | None = None, **message: Any) -> None:
        with open(self.pipe, "wb", buffering=0) as pipe:
            pipe.write((to_json({"serial": serial or self.serial, **message}) + "\n").encode())


class OnDemand:
    fetched = 0

    async def open(self, source: Any) -> list[Any]:
        self.fetched += 1
        return SENT

    def with_changes(self, source: Any) -> None: ...


def published(version: int = 5, session: Session | None = SESSION) -> PublishedWeights:
    canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), EXACT)
    return PublishedWeights(WeightsManifest(WeightIdentity(1, version, "d"), (), canary), "source", session)


class Replica:
    def __init__(self) -> None:
        self.engine, self.on_demand = Engine(), OnDemand()
        self.broadcasts = Broadcasts(self.on_demand, self.engine.start)

    async def bytes_of(self, number: int = 2, **options: Any) -> list[Any]:
        async with self.broadcasts.fetched(number, published(**options)) as arrived:
            mapped = [region.map().tolist() for region in arrived.regions]
        assert [bucket.tolist() for bucket in arrived.buckets] == mapped
        return mapped


@asynccontextmanager
async def running() -> AsyncIterator[Replica]:
    """A replica, after whose end no descriptor is left open. (Other threads open files for a while, such as the one
    that counts what tests cost.)"""
    before = set(os.listdir("/proc/self/fd"))
    replica = Replica()
    async with asyncio.timeout(20):
        yield replica
    replica.broadcasts.close()
    del replica.engine.landing
    await wait_for_tasks(lambda: set(os.listdir("/proc/self/fd")) <= before, "descriptors to be closed")


async def test_what_was_broadcast_is_mapped_where_it_arrived() -> None:
    async with running() as replica:
        await replica.broadcasts.offer(OFFER)
        waiting = asyncio.create_task(replica.bytes_of())
        await asyncio.sleep(0)
        replica.engine.say(arrived=replica.engine.arrival, changes=False)
        assert await waiting == [bucket.tolist() for bucket in SENT]
    assert replica.on_demand.fetched == 0


async def test_what_arrived_on_the_engines_device_is_mapped_by_nobody() -> None:
    async with running() as replica:
        await replica.broadcasts.offer(OFFER)
        replica.engine.say(arrived=ON_DEVICE, changes=False)
        async with replica.broadcasts.fetched(2, published()) as arrived:
            assert [(region.path, region.offset) for region in arrived.regions] == [
                (ON_DEVICE, 0), (ON_DEVICE, 4096), (ON_DEVICE, 4096)
            ]  # fmt: skip
            assert (list(arrived.buckets), arrived.nbytes) == ([], sum(OFFER.sizes))
    assert replica.on_demand.fetched == 0


async def test_a_replica_that_is_not_ready_says_why() -> None:
    async with running() as replica:

        async def cannot(offer: Offer, serial: int, pipe: str) -> None:
            replica.engine.serial, replica.engine.pipe = serial, pipe
            replica.engine.say(failed="the store does not answer")

        replica.broadcasts._start = cannot
        with pytest.raises(RoomFailed, match="the store does not answer"):
            await replica.broadcasts.offer(OFFER)

        async def hangs(offer: Offer, serial: int, pipe: str) -> None: ...

        replica.broadcasts._start = hangs
        with pytest.raises(RoomFailed, match="the engine was not ready to receive version 5 in 0 s"):
            await replica.broadcasts.offer(replace(OFFER, timeout_s=0.05))


@pytest.mark.parametrize(
    ("number", "happens", "reason"),
    [
        (1, "", "inference replica 1 takes version 5 on demand: it is not in the session"),
        (2, "failed", "on demand: Connection reset by peer"),
        (2, "late", "on demand: not all has arrived in the 0 s that it may take"),
        (2, "engine lost", "on demand: its engine was started anew, or another version was offered"),
        (2, "next offered", "on demand: its engine was started anew, or another version was offered"),
    ],
)
async def test_what_did_not_arrive_is_fetched_and_that_is_said(
    number: int, happens: str, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.session.GRACE_S", 0.0)
    async with running() as replica:
        await replica.broadcasts.offer(replace(OFFER, timeout_s=0.3) if happens == "late" else OFFER)
        if happens == "failed":
            replica.engine.say(failed="Connection reset by peer")
        elif happens == "engine lost":
            replica.broadcasts.lose_engine()
        elif happens == "next offered":
            await replica.broadcasts.offer(replace(OFFER, version=6))
        assert await replica.bytes_of(number=number) == [bucket.tolist() for bucket in SENT]
        await replica.bytes_of(session=None)
    assert replica.on_demand.fetched == 2
    assert reason in caplog.text
    assert caplog.text.count("on demand") == 1, "of a version without session, of another transport, nothing is said"


async def test_nobody_waits_for_a_version_once_a_later_one_is_offered(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as replica:
        await replica.broadcasts.offer(OFFER)
        waiting = asyncio.create_task(replica.bytes_of())
        await asyncio.sleep(0)
        first = replica.engine.serial
        await replica.broadcasts.offer(replace(OFFER, version=6))
        await waiting
        replica.engine.say(serial=first, failed="a later version was offered")  # by the thread that was given up
        replica.engine.say(arrived=replica.engine.arrival, changes=False)
        await replica.bytes_of(version=6)
    assert replica.on_demand.fetched == 1
    assert "version 5 on demand: version 6 was offered" in caplog.text
    assert "version 6 on demand" not in caplog.text


async def test_the_next_version_does_not_take_the_memory_of_one_that_is_being_mapped() -> None:
    async with running() as replica:
        await replica.broadcasts.offer(OFFER)
        replica.engine.say(arrived=replica.engine.arrival, changes=False)
        async with replica.broadcasts.fetched(2, published()) as arrived:
            offered = asyncio.create_task(replica.broadcasts.offer(replace(OFFER, version=6)))
            await asyncio.sleep(0.1)
            assert replica.engine.offered == [5], "it has not begun, so the file of version 5 is still there"
            assert [len(region.map()) for region in arrived.regions] == list(OFFER.sizes)
        del arrived  # with what it has mapped
        await offered
        assert replica.engine.offered == [5, 6]
    assert replica.on_demand.fetched == 0
