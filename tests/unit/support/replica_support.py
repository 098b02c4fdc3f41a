"""What replicas in front of a router have in common, and the weights that they are sent."""

from collections.abc import Mapping, Sequence

import numpy as np

from inference.handover import Progress
from trireme.core.sampler import ReplicaStats
from trireme.core.types import WeightIdentity
from trireme.core.weights import EXACT, Canary, PublishedWeights, WeightsManifest


def weights(version: int) -> PublishedWeights:
    canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), EXACT)
    return PublishedWeights(WeightsManifest(WeightIdentity(1, version, f"d{version}"), (), canary), ())


class IdleReplica:
    """Has nothing to do and nothing to say; the test adds `sample` and `load_weights`."""

    identity: WeightIdentity | None = None

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Progress]:
        return {}

    async def abort(self, request_ids: Sequence[str]) -> None:
        return

    async def adopt(self, identity: WeightIdentity) -> None:
        self.identity = identity

    async def stats(self) -> ReplicaStats:
        return ReplicaStats(0, 0, 0.0, 0)
