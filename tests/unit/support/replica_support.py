"""What replicas in front of a router have in common, and the weights that they are sent."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inference.handover import Progress
from inference.replica_set.actor import ReplicaSet
from inference.router import Router
from trireme.core.sampler import ReplicaStats
from trireme.core.types import WeightIdentity
from trireme.core.weights import EXACT, Canary, PublishedWeights, WeightsManifest


def weights(version: int) -> PublishedWeights:
    canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), EXACT)
    return PublishedWeights(WeightsManifest(WeightIdentity(1, version, f"d{version}"), (), canary), ())


def router_of(
    replicas: Mapping[int, Any],
    *,
    fixed: bool = False,
    patience_s: float = 0.0,
    update_s: float = math.inf,
    kind: type[Router] = Router,
    **options: Any,
) -> Router:
    """Returns the router of a replica set in this process, which is its `source`."""
    source = ReplicaSet(replicas, fixed=fixed, patience_s=patience_s, update_s=update_s)
    return kind(source, fixed=fixed, patience_s=patience_s, **options)


class IdleReplica:
    """Has nothing to do and nothing to say; the test adds `sample` and `load_weights`."""

    identity: WeightIdentity | None = None

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Progress]:
        return {}

    async def abort(self, request_ids: Sequence[str]) -> None:
        return

    async def abort_all(self) -> None:
        return

    async def adopt(self, identity: WeightIdentity) -> None:
        self.identity = identity

    async def stats(self) -> ReplicaStats:
        return ReplicaStats(0, 0, 0.0, 0)
