"""The parts of a plan of `trireme serve`: trainer and replicas that also keep weights for samplers in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trireme.config.run import DTYPE_BYTES
from trireme.config.schema import Config
from trireme.plan.needs import SAMPLER_WEIGHTS, Need
from trireme.plan.rl import InferencePart
from trireme.plan.trainer import TrainerPart

WAITING_ADAPTERS = "adapters that wait"
"""The purpose of the host memory for adapters that wait while another adapter is trained: their values, both moments
and gradients."""


def sets_of_weights(config: Config) -> int:
    """Returns how many sets of weights are kept for samplers: the set of the base, and `service.tinker.snapshots` more.
    With LoRA the total is at least the number of adapters that a replica keeps in host memory."""
    if config.trainer.lora.on:
        adapters = config.inference.kept_loras - 1
    else:
        adapters = 0
    return 1 + max(config.service.tinker.snapshots, adapters)


@dataclass(frozen=True)
class ServedTrainerPart(TrainerPart):
    """The trainer's part of a plan of `trireme serve`. Each shard also keeps its share of three things: the base's
    published weights, the weights of samplers, and the adapters that wait while another adapter is trained."""

    config: Config

    @property
    def needs(self) -> list[Need] | None:
        """The memory that each shard needs, including its share of the base's published weights, the weights of
        samplers, and the adapters that wait."""
        needs = super().needs
        if needs is None:
            return None
        if self.config.trainer.lora.on:
            needs = [replace(need, host={**need.host, WAITING_ADAPTERS: self._waiting}) for need in needs]
        share = sets_of_weights(self.config) * -(-self.published_bytes // self.config.trainer.mesh.processes)
        if self.transport.stored:
            return [replace(need, parts={**need.parts, SAMPLER_WEIGHTS: share}) for need in needs]
        return [replace(need, host={**need.host, SAMPLER_WEIGHTS: share}) for need in needs]

    @property
    def _waiting(self) -> int:
        """Bytes of a shard's share of the adapters that wait in host memory. There are `service.models` adapters and
        the initial adapter. One of them is in the model, so `service.models` adapters wait."""
        assert self.facts is not None, "there are needs"
        trainer = self.config.trainer
        values = self.facts.trained_parameters(trainer.lora) // trainer.mesh.parts
        return self.config.service.models * 4 * DTYPE_BYTES[trainer.master_dtype] * values


@dataclass(frozen=True)
class ServedInferencePart(InferencePart):
    """The replicas' part of a plan of `trireme serve`: replicas sample with all kept sets of weights in turn, so Ray's
    object store on each of their machines holds all sets."""

    @property
    def encoding(self) -> str:
        # Replicas change between sets of weights, of which none is the base of another.
        if self.config.encoding == "auto":
            return "dense"
        return self.config.encoding

    @property
    def needs(self) -> list[Need] | None:
        """The memory that each replica needs, with all sets of weights in Ray's object store on its machine."""
        needs = super().needs
        if needs is None or not self.transport.stored:
            return needs
        weights = sets_of_weights(self.config) * self.published_bytes
        return [replace(need, shared={**need.shared, SAMPLER_WEIGHTS: weights}) for need in needs]


SERVE_ROOMS = (ServedTrainerPart, ServedInferencePart)
