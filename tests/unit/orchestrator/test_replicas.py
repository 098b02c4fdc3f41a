"""The replicas of a run together: deadlines of their updates, and the sessions in which they receive weights."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from orchestrator_fakes import small_config

from orchestrator.replicas import ANSWER_S, Replicas, update_deadline_s
from trireme.core.transport import Offer, Session

OFFER = Offer(3, 7, (64,), ("here",), 300.0)


@pytest.mark.parametrize(
    ("replicas", "max_updating", "turns"), [(1, None, 1), (33, None, 1), (33, 1, 33), (33, 8, 5), (2, 8, 1)]
)
def test_an_update_may_take_as_many_turns_as_it_has(replicas: int, max_updating: int | None, turns: int) -> None:
    """And one more, for a replica that still takes the version before."""
    config = small_config()
    config = config.model_copy(update={"inference": config.inference.model_copy(update={"max_updating": max_updating})})
    expected_s = (turns + 1) * config.timeouts.update_s + config.patience_s + ANSWER_S
    assert update_deadline_s(config, replicas) == expected_s


class Members:
    """The sampler's part in an offer: its own epoch and members."""

    def __init__(self, *members: int) -> None:
        self.epoch, self.members, self.offers = 1, members, 0

    def become(self, *members: int) -> None:
        self.epoch, self.members = self.epoch + 1, members

    async def offer(self, offer: Offer) -> Session:
        self.offers += 1
        return Session(offer.attempt, self.epoch, dict.fromkeys(self.members, 0))


def replicas_of(trained: Any, reserved: Any = None) -> Replicas:
    return Replicas(small_config(), trained, reserved, lambda: None)


async def test_replicas_for_training_and_reserved_ones_take_part_in_one_session() -> None:
    trained, reserved = Members(0, 3), Members(2)
    replicas = replicas_of(trained, reserved)
    assert await replicas.offer(OFFER) == Session(3, 1, dict.fromkeys((0, 2, 3), 0))
    assert (await replicas.offer(OFFER)).epoch == 1
    trained.become(0, 3)  # a successor
    assert await replicas.offer(OFFER) == Session(3, 2, dict.fromkeys((0, 2, 3), 0))
    reserved.become(2)
    assert await replicas.offer(OFFER) == Session(3, 3, dict.fromkeys((0, 2, 3), 0))
    trained.become(0)
    reserved.become(2, 5)
    assert await replicas.offer(OFFER) == Session(3, 4, dict.fromkeys((0, 2, 5), 0))
    assert (await replicas.offer(OFFER)).epoch == 4
    trained.become()
    reserved.become()
    assert await replicas.offer(OFFER) == Session(3, 5, {})


def test_without_reserved_ones_the_session_is_that_of_the_others() -> None:
    async def offers() -> list[int]:
        trained = Members(1)
        replicas = replicas_of(trained)
        epochs = [(await replicas.offer(OFFER)).epoch for _ in range(2)]
        trained.become(1, 2)
        return [*epochs, (await replicas.offer(OFFER)).epoch]

    assert asyncio.run(offers()) == [1, 1, 2]


async def test_reserved_ones_are_not_asked_while_an_update_is_in_progress_that_they_may_be_next_to_take() -> None:
    trained, reserved = Members(0), Members(1)
    replicas = replicas_of(trained, reserved)
    assert (await replicas.offer(OFFER)).members == (0, 1)
    ended = asyncio.Event()

    async def update() -> None:
        await ended.wait()

    replicas.update = asyncio.create_task(update())
    assert await replicas.offer(OFFER) == Session(3, 2, dict.fromkeys((0,), 0))
    assert (await replicas.offer(OFFER)).epoch == 2
    assert reserved.offers == 1
    ended.set()
    await replicas.update
    assert await replicas.offer(OFFER) == Session(3, 3, dict.fromkeys((0, 1), 0))


async def test_reserved_ones_that_took_no_part_begin_no_epoch_when_they_are_not_asked() -> None:
    replicas = replicas_of(Members(0), Members())
    assert await replicas.offer(OFFER) == Session(3, 1, dict.fromkeys((0,), 0))
    replicas.update = asyncio.create_task(asyncio.sleep(30.0))
    await asyncio.sleep(0)
    assert await replicas.offer(OFFER) == Session(3, 1, dict.fromkeys((0,), 0))
    replicas.update.cancel()
