"""The rooms of `trireme serve`: those of a loop, whose weights for samplers stay in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trireme.config.schema import Config
from trireme.plan.needs import SAMPLER_WEIGHTS, Need
from trireme.plan.rl import InferencePart
from trireme.plan.trainer import TrainerPart
from trireme.plan.transport import choose_transport


@dataclass(frozen=True)
class ServedTrainerPart(TrainerPart):
    """Shards that also keep the base's weights and those of samplers, each its share."""

    config: Config

    @property
    def needs(self) -> list[Need] | None:
        """The memory of each shard."""
        if (needs := super().needs) is None:
            return None
        share = (1 + self.config.service.tinker.snapshots) * -(-self.published_bytes // self.config.trainer.processes)
        if choose_transport(self.config, self.resources)[0] == "broadcast":
            return [replace(need, host={**need.host, SAMPLER_WEIGHTS: share}) for need in needs]
        return [replace(need, parts={**need.parts, SAMPLER_WEIGHTS: share}) for need in needs]


@dataclass(frozen=True)
class ServedInferencePart(InferencePart):
    """Replicas on whose machines Ray's object store comes to hold all of these weights, as they take turns."""

    @property
    def needs(self) -> list[Need] | None:
        """The memory of each replica."""
        if (needs := super().needs) is None or choose_transport(self.config, self.resources)[0] == "broadcast":
            return needs
        weights = (1 + self.config.service.tinker.snapshots) * self.published_bytes
        return [replace(need, shared={**need.shared, SAMPLER_WEIGHTS: weights}) for need in needs]


SERVE_ROOMS = (ServedTrainerPart, ServedInferencePart)
