"""The model that a Tinker server offers, and how many clients it serves with it at the same time."""

from __future__ import annotations

from dataclasses import dataclass

from service.asked import ServedModels
from trireme.config.service import TinkerConfig
from trireme.config.trainer import LoraConfig


@dataclass(frozen=True)
class TinkerOffer:
    """One model."""

    served: ServedModels
    """Its names, the first of which clients are told, and its sizes."""
    tokenizer_id: str
    """Its tokenizer: a directory, or a name on the hub."""
    options: TinkerConfig
    lora: LoraConfig | None = None
    """The adapters that are trained; None: the whole model is."""
    places: int = 1
    """The number of models that are trained at the same time; 1 unless they are adapters."""
    slots: int = 0
    """The number of adapters that replicas hold at the same time beside the base; 0: they hold one set of weights."""

    @property
    def kept(self) -> int:
        """The number of sets of weights that are kept for samplers beside the base's and those in use."""
        return max(self.options.snapshots, self.slots)
