"""Chats beside a run, in virtual time: 50 clients that never stop asking get `service.share` of the places in which
replicas decode, and training is slower by about as much."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from replica_support import joined
from simulation import NO_DEADLINE_S, Outcome, Scenario, SimReplica, simulate
from test_pipeline_in_virtual_time import check

from inference.replica_set.actor import ReplicaSet
from inference.router import Router
from service.actor import ServiceActor
from service.places import Places
from service.requests import ServedModels
from trireme.core.sampler import ReplicaStats
from trireme.core.types import SampleRequest, SamplingParams, WeightIdentity

CLIENTS = 50
FULL = Scenario("drop", 1, steps=12, spread=0.2, train_s=0.1, update_s=0.1, publish_s=0.1, batch_size=16)
"""There are always more rollouts than places, and training waits for them."""
PLACES = FULL.replicas * FULL.slots
CHAT_TOKENS = 1000


class WithPlaces:
    """A replica as its router sees it, which says how many sequences it decodes together."""

    def __init__(self, replica: SimReplica) -> None:
        self._replica = replica

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    async def stats(self) -> ReplicaStats:
        return replace(await self._replica.stats(), places=FULL.slots)

    async def adopt(self, identity: WeightIdentity) -> None:
        """It has the weights of its run."""


@dataclass
class Chats:
    """The clients of a service, which ask again and again."""

    share: float
    peak: int = 0
    """The most chats that replicas had at a time, once there were places for more than the first."""
    answered: int = 0

    async def ask(self, outcome: Outcome) -> None:
        """Lets all clients ask, with the places that the service's own actor gives them."""
        config = outcome.scenario.config()
        config = config.model_copy(update={"service": config.service.model_copy(update={"share": self.share})})
        while any(replica._identity is None for replica in outcome.replicas):  # noqa: ASYNC110  time is virtual
            await asyncio.sleep(0.1)
        replicas = ReplicaSet({}, adopt=outcome.replicas[0]._identity, patience_s=NO_DEADLINE_S)
        router = Router(replicas, progress_s=NO_DEADLINE_S, reports=False)
        models = ServedModels(("policy",), 10**6, 10**6)
        actor = ServiceActor(config, lambda: router, models, [], True, Path(), None)
        actor._sampler, actor._places = router, Places(1, CLIENTS, NO_DEADLINE_S)
        for index, replica in enumerate(outcome.replicas):
            await joined(replicas, index, WithPlaces(replica))  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as group:
            group.create_task(actor._fit_places())
            for number in range(CLIENTS):
                group.create_task(self._client(router, actor._places, number))

    async def _client(self, router: Router, places: Places, number: int) -> None:
        for turn in range(10**6):
            places.check(1)
            async with places:
                self.peak = max(self.peak, places.taken)
                await router.sample(
                    SampleRequest(
                        f"chat-{number}-{turn}",
                        np.array([900_000 + number, turn], np.int32),
                        SamplingParams(max_tokens=CHAT_TOKENS, seed=0),
                        f"chat-{number}",
                    )
                )
            self.answered += 1


def seconds_with(share: float) -> tuple[float, Chats]:
    """Returns how long the run takes beside the clients."""
    chats = Chats(share)
    outcome = simulate(FULL, beside=[chats.ask])
    check(outcome)
    return outcome.seconds, chats


def test_chats_have_their_share_of_the_places_and_training_is_slower_by_about_as_much() -> None:
    alone = simulate(FULL).seconds
    slower: dict[float, float] = {}
    for share, limit in ((0.1, int(0.1 * PLACES)), (1.0, CLIENTS)):
        seconds, chats = seconds_with(share)
        assert chats.peak == limit, "they want more, and get no more"
        assert chats.answered > CLIENTS
        slower[share] = seconds / alone
    assert slower[0.1] < 1 / (1 - 0.1)
    assert slower[1.0] > 1.2, "else the bound above says nothing"


def test_a_share_of_less_than_one_place_is_one_place() -> None:
    _, chats = seconds_with(0.001)
    assert chats.peak == 1
    assert chats.answered > 0
