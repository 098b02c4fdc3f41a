"""The sets of weights that samplers can be given, in memory, by the names of `service.tinker.turns`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from service.tinker.bodies import SaveForSamplerBody
from service.tinker.catalog import path_of
from trireme.core.weights import PublishedWeights

BASE = "base"


class WeightShelf(OrderedDict[str, PublishedWeights]):
    """All of them, the newest last."""

    def put(self, target: str, weights: PublishedWeights, in_use: Collection[str], limit: int) -> None:
        """Adds a set. Apart from the sets `in_use` and the base's, the newest `limit` sets stay."""
        self[target] = weights
        self.move_to_end(target)
        for name in [candidate for candidate in self if candidate not in in_use and candidate != BASE][:-limit]:
            del self[name]


def following(model_id: str) -> str:
    """Returns the name of the weights of samplers that follow a model."""
    return f"{model_id}/inflight"


def target_of(model_id: str, work: SaveForSamplerBody) -> str:
    """Returns the name of the weights that a request makes available to samplers."""
    if work.path is not None:
        return path_of(model_id, "sampler_weights", work.path)
    if work.kind == "inflight":
        return following(model_id)
    return f"{model_id}/snapshot/{work.sampling_session_seq_id}"
