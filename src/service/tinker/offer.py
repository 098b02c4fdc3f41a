"""The model that a Tinker server offers, and how many clients it serves with it at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.requests import RequestRefused, ServedModels
from trireme.config.service import TinkerConfig
from trireme.config.trainer import LoraConfig
from trireme.core.datum import ModelInput


@dataclass(frozen=True)
class TinkerOffer:
    """One model."""

    served: ServedModels
    """Its names (clients see the first), and its sizes."""
    tokenizer_id: str
    """Its tokenizer: a directory, or a name on the hub."""
    options: TinkerConfig
    lora: LoraConfig | None = None
    """The adapters that are trained; None: the whole model is."""
    places: int = 1
    """The number of models that are trained at the same time; 1 unless they are adapters."""
    slots: int = 0
    """The number of adapters that replicas hold at the same time in addition to the base; 0: they hold one set of
    weights.
    """

    @property
    def cached_sets(self) -> int:
        """The number of sets of weights kept for samplers in addition to the base's and the sets in use."""
        return max(self.options.snapshots, self.slots)

    @property
    def base_model(self) -> str:
        """The name of the model that it serves."""
        return self.served.names[0]

    @property
    def listed(self) -> tuple[str, ...]:
        """The names in the list of all models."""
        return (self.base_model, *self.options.names)

    @property
    def greeting(self) -> str:
        """A sentence for clients that begin a session."""
        lora = self.lora
        if lora is None:
            return "this server trains whole models: lora_config has no effect"
        if "lm_head" in lora.target_modules:
            without = ""
        else:
            without = "; train_unembed has no effect"
        return f"this server trains adapters up to rank {lora.rank} for {', '.join(lora.target_modules)}{without}"

    def serves(self, base_model: str | None) -> bool:
        """Returns whether `base_model` is a name of that model."""
        return base_model in self.served.names

    def room(self, prompt: ModelInput, stop: Sequence[int]) -> int:
        """Returns how many tokens may follow a prompt. Raises RequestRefused for one that the model cannot read, and
        for ids in `stop` that it cannot sample."""
        served = self.served
        tokens = prompt.tokens
        vocabulary = served.vocab_size
        context = served.max_len
        if not len(tokens) or tokens.max() >= vocabulary:
            raise RequestRefused(f"a prompt of {len(tokens)} tokens; expected at least one, all below {vocabulary}")
        unknown = [token for token in stop if token >= vocabulary]
        if unknown:
            raise RequestRefused(f"stop = {unknown[0]}; expected ids below {vocabulary}, the model's vocabulary")
        if len(tokens) >= context:
            raise RequestRefused(
                f"a prompt of {len(tokens)} tokens; expected less than {context}, the context of the model"
            )
        return context - len(tokens)
