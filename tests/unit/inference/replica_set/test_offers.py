"""Sessions of a router: who is asked and who takes part. All times are virtual. That an epoch begins exactly when the
members are others: tests/sim/test_sessions_in_virtual_time.py."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from replica_support import IdleReplica, router_of
from replica_support import weights as version

from inference.handover import Outcome
from inference.replica_set.actor import IDLE_TICK_S
from inference.router import Router
from trireme.core.deadline import LEAST_S, TAUGHT_BY
from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import ReplicaStats
from trireme.core.transport import Offer, Session
from trireme.core.types import SampleRequest
from trireme.core.weights import Drift, PublishedWeights, UpdateReport

pytestmark = pytest.mark.virtual_time

TIMEOUT_S = 300.0
READY_S = 30.0


def offer(number: int) -> Offer:
    return Offer(1, number, (64, 64), ("here",), TIMEOUT_S)


class Replica(IdleReplica):
    """Is ready for an offer after `ready_s` seconds, and has taken weights after `update_s`."""

    def __init__(self, index: int, ready_s: float = 0.0, update_s: float = 0.0, node: str = "") -> None:
        self.name, self.node, self.servers = f"replica {index}", node, list[int]()
        self.ready_s, self.update_s, self._index = ready_s, update_s, index
        self.refusal: TriremeError | None = None
        self.dead: TriremeError | None = None
        self.offered: list[int] = []
        self.loading = False

    async def offer(self, offer: Offer) -> None:
        assert not self.loading, "it would receive beside bytes that it has still to load"
        self.offered.append(offer.version)
        self.servers.append(offer.server)
        await (asyncio.sleep(self.ready_s) if self.ready_s < math.inf else asyncio.Event().wait())
        if self.refusal:
            raise self.refusal

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        self.loading = True
        await asyncio.sleep(self.update_s)
        self.loading = False
        return UpdateReport(self._index, published.identity, Drift(0.0, 0.0), 0, 0.0, node=self.node)

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        await asyncio.Event().wait()
        yield 0, RoomFailed("never")

    async def stats(self) -> ReplicaStats:
        if self.dead:
            raise self.dead
        return await super().stats()


def fleet(*replicas: Replica, **options: Any) -> Router:
    return router_of(dict(enumerate(replicas)), update_s=300.0, **options)


async def publish(router: Router, number: int) -> Session:
    """A whole publication: the session, and the update."""
    session = await router.source.offer(offer(number))
    await router.source.update(version(number))
    return session


def now() -> float:
    return asyncio.get_running_loop().time()


# ---- who takes part


async def test_one_that_is_lost_while_all_are_asked_is_not_waited_for() -> None:
    router = fleet(*(Replica(i, ready_s=2.0) for i in range(3)))
    assert await router.source.offer(offer(0)) == Session(1, 1, dict.fromkeys((0, 1, 2), 0))
    assert now() == 2.0
    router = fleet(Replica(0, ready_s=1.0), Replica(1, ready_s=math.inf), Replica(2, ready_s=math.inf))
    asking = asyncio.create_task(router.source.offer(offer(0)))
    await asyncio.sleep(2.0)
    router.source.leave(1, "replica 1 died")
    drain = asyncio.create_task(router.source.drain(2, 1.0))
    assert (await asking).members == (0,)
    assert now() == pytest.approx(4.0 + IDLE_TICK_S)
    await drain


async def test_replicas_of_a_node_are_served_by_one_rank_once_they_have_said_where_they_are() -> None:
    replicas = [Replica(i, node="a" if i < 3 else "b") for i in range(4)]
    router, ranks = fleet(*replicas), ("here", "there")
    first = await router.source.offer(replace(offer(0), endpoints_R=ranks))
    assert first.servers == {0: 0, 1: 1, 2: 0, 3: 1}
    await router.source.update(version(0))
    second = await router.source.offer(replace(offer(1), endpoints_R=ranks))
    assert [second.served_by(rank) for rank in range(2)] == [(0, 1, 2), (3,)]
    assert second.epoch == first.epoch + 1, "others follow each other"
    assert [replica.servers for replica in replicas] == [[0, 0], [1, 0], [0, 0], [1, 1]]
    await router.source.update(version(1))
    replicas[1].refusal = RoomFailed("replica 1 cannot")
    third = await router.source.offer(replace(offer(2), endpoints_R=ranks))
    assert [third.served_by(rank) for rank in range(2)] == [(0, 2), (3,)]


async def test_a_late_one_is_left_out_said_once_and_costs_its_limit_once(caplog: pytest.LogCaptureFixture) -> None:
    hanging = Replica(1, ready_s=math.inf)
    router = fleet(Replica(0), hanging)
    for number in range(4):
        assert (await publish(router, number)).members == (0,)
    assert now() == READY_S
    assert hanging.offered == [0], "its answer is still missing"
    assert router.acknowledged() == {0: 3, 1: 3}, "it takes the weights, and is not dismissed"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == (
        "replica 1 takes no part in the sending of version 0 and fetches it: it was not ready within 30.0 s"
    )


async def test_one_that_refuses_is_left_out_meanwhile_and_stays_a_replica(caplog: pytest.LogCaptureFixture) -> None:
    broken = Replica(1)
    broken.refusal = RoomFailed("replica 1: its group broke")
    router = fleet(Replica(0), broken)
    sessions = [await publish(router, number) for number in range(3)]
    broken.refusal = None
    sessions.append(await publish(router, 3))
    assert [session.members for session in sessions] == [(0,), (0,), (0,), (0, 1)]
    assert [session.epoch for session in sessions] == [1, 1, 1, 2]
    assert caplog.text.count("fetches it: replica 1: its group broke") == 1
    assert router.acknowledged() == {0: 3, 1: 3}
    broken.refusal = RoomFailed("replica 1: its group broke again")
    await publish(router, 4)
    assert caplog.text.count("fetches it: replica 1: its group broke again") == 1, "once in each epoch"


async def test_the_time_limit_is_learned_and_late_answers_teach_too() -> None:
    first, second = Replica(0, ready_s=0.1), Replica(1, ready_s=0.1)
    router = fleet(first, second)
    for number in range(TAUGHT_BY):
        await publish(router, number)
    started, second.ready_s = now(), 20.0
    assert (await publish(router, 98)).members == (0,)
    assert now() - started == pytest.approx(LEAST_S)
    await asyncio.sleep(20.0)
    assert (await publish(router, 99)).members == (0, 1), "20 s are usual now"


# ---- updates, joins and leaves


async def test_those_that_have_still_to_take_the_version_before_are_not_asked_and_nothing_waits_for_them() -> None:
    replicas = [Replica(i, update_s=10.0 * (i + 1)) for i in range(3)]
    router = fleet(*replicas)
    assert (await router.source.offer(offer(0))).members == (0, 1, 2)
    update = asyncio.create_task(router.source.update(version(0)))
    for after_s, members in ((5.0, ()), (15.0, (0,)), (25.0, (0, 1)), (35.0, (0, 1, 2))):
        await asyncio.sleep(after_s - now())
        assert (await router.source.offer(offer(1))).members == members
        assert now() == after_s
    await update


async def test_one_that_fetches_what_was_not_sent_to_it_is_waited_for_once() -> None:
    """Else it would be busy with fetching at each offer."""
    late = Replica(1, ready_s=40.0)
    router = fleet(Replica(0), late)
    assert (await router.source.offer(offer(0))).members == (0,)
    late.ready_s, late.update_s = 0.0, 12.0
    update = asyncio.create_task(router.source.update(version(0)))
    await asyncio.sleep(10.0)  # its answer has come
    assert (await router.source.offer(offer(1))).members == (0, 1)
    assert now() == READY_S + 12.0
    await update
    update, late.update_s = asyncio.create_task(router.source.update(version(1))), 100.0
    for _ in range(2):
        before = now()
        await asyncio.sleep(1.0)
        assert (await router.source.offer(offer(2))).members == (0,), "it was sent that version, and is slow"
        assert now() == before + 1.0
    await update


async def test_those_that_sleep_receive_meanwhile() -> None:
    """While the trainer has their devices; the update that wakes them finds the bytes there."""
    router = fleet(Replica(0), Replica(1))
    await publish(router, 0)
    await router.source.sleep()
    assert (await router.source.offer(offer(1))).members == (0, 1)
    assert (await router.source.offer(offer(2))).members == (0, 1), "no update was between"
    await router.source.update(version(2))
    assert (await publish(router, 3)).members == (0, 1)


# ---- leaving


async def test_a_member_leaves_when_the_version_that_is_being_sent_to_it_is_published_or_late() -> None:
    router = fleet(Replica(0), Replica(1))
    await publish(router, 0)
    await router.source.offer(offer(1))
    drain = asyncio.create_task(router.source.drain(1, 1.0))
    await asyncio.sleep(100.0)
    assert not drain.done(), "its end would break a group that is sending"
    await router.source.update(version(1))
    await drain
    assert now() == 100.0
    await router.source.drain(0, 1.0)
    assert now() == 100.0 + IDLE_TICK_S, "nothing is on its way"
    router, started = fleet(Replica(0), Replica(1, ready_s=math.inf)), now()
    await router.source.offer(offer(0))
    await router.source.drain(1, 1.0)
    assert now() - started == pytest.approx(READY_S + IDLE_TICK_S), "it takes no part"
    await router.source.drain(0, 1.0)
    assert now() - started == pytest.approx(TIMEOUT_S)
