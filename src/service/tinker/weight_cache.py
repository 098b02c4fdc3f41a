"""The sets of weights in memory for samplers, by the names that `service.tinker.sample_scheduler` uses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from service.tinker.bodies import SaveForSamplerBody
from service.tinker.catalog import path_of
from trireme.core.weights import PublishedWeights

BASE = "base"


class WeightCache(OrderedDict[str, PublishedWeights]):
    """The published weights by name, the newest weights last."""

    def put(self, target: str, weights: PublishedWeights, in_use: Collection[str], limit: int) -> None:
        """Adds weights under the name `target`. Then removes old weights: retains the base's weights, weights with a
        name in `in_use`, and the newest `limit` of all other weights."""
        self[target] = weights
        self.move_to_end(target)
        for name in [candidate for candidate in self if candidate not in in_use and candidate != BASE][:-limit]:
            del self[name]


def following(model_id: str) -> str:
    """Returns the name of a model's weights for samplers that always use the newest set: each set that is published
    under this name replaces the set before it."""
    return f"{model_id}/inflight"


def target_of(model_id: str, work: SaveForSamplerBody) -> str:
    """Returns the name under which a request makes the weights of a model available to samplers."""
    if work.path is not None:
        return path_of(model_id, "sampler_weights", work.path)
    if work.kind == "inflight":
        return following(model_id)
    return f"{model_id}/snapshot/{work.sampling_session_seq_id}"
