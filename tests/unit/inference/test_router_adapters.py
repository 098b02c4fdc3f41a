"""Adapters beside the weights of updates: which replicas get them, and when."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
from replica_support import IdleReplica, joined, losses, router_of, weights

from inference.handover import Outcome
from inference.router import Router
from trireme.core.errors import RoomFailed
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity
from trireme.core.weights import PublishedWeights, UpdateReport


class Replica(IdleReplica):
    def __init__(self, number: int) -> None:
        self.name, self.index = f"replica {number}", number
        self.adapters: dict[str, WeightIdentity] = {}
        self.capacity = 9
        self.calls: list[str] = []

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        for number, request in enumerate(requests):
            spans = (VersionSpan(self.adapters[request.adapter], 0, 1),)
            yield number, SampledSequence(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", spans)

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        self.adapters[""] = published.identity
        self.calls.append("update")
        return await super().load_weights(published)

    async def load_adapter(self, name: str, published: PublishedWeights) -> None:
        self.calls.append(name)
        if len(self.adapters) > self.capacity:
            raise RoomFailed(f"{self.name} has no room")
        self.adapters[name] = published.identity

    async def drop_adapter(self, name: str) -> None:
        del self.adapters[name]


async def sampled(router: Router, adapter: str, key: str) -> int:
    """The version of the weights that an answer names."""
    request = SampleRequest(
        f"{adapter}/{key}", np.zeros(1, np.int32), SamplingParams(max_tokens=1), key, adapter=adapter
    )
    return (await router.sample(request)).spans[0].identity.version


async def test_every_replica_has_all_adapters_beside_the_newest_weights() -> None:
    replicas = [Replica(0), Replica(1)]
    router = router_of(dict(enumerate(replicas)))
    await router.source.update(weights(0))
    for version, name in enumerate("ab", start=1):
        await router.source.load_adapter(name, weights(version))
    await router.source.update(weights(3))
    for key in "xyz":
        versions = [await sampled(router, adapter, key) for adapter in ("", "a", "b")]
        assert versions == [3, 1, 2]
    await router.source.drop_adapter("a")
    assert [sorted(replica.adapters) for replica in replicas] == [["", "b"]] * 2


async def test_one_that_joins_gets_them_before_it_serves() -> None:
    first, joiner = Replica(0), Replica(1)
    router = router_of({0: first})
    await router.source.update(weights(0))
    await router.source.load_adapter("a", weights(1))
    await router.source.load_adapter("b", weights(2))
    await router.source.drop_adapter("a")
    await joined(router.source, 1, joiner)
    assert joiner.calls == ["update", "b"]
    router.source.leave(0, "it is dead")
    assert await sampled(router, "b", "x") == 2


async def test_one_that_cannot_take_an_adapter_is_used_no_more() -> None:
    replicas = [Replica(0), Replica(1)]
    replicas[0].capacity = 0
    router = router_of(dict(enumerate(replicas)))
    await router.source.update(weights(0))
    await router.source.load_adapter("a", weights(1))
    assert await losses(router.source) == {0: "replica 0 has no room"}
    assert [await sampled(router, "a", key) for key in "xy"] == [1, 1]
    replicas[1].capacity = 0
    with pytest.raises(RoomFailed, match=r"no inference replica is left.*no room"):
        await router.source.load_adapter("b", weights(2))
