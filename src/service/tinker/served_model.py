"""The model that a Tinker server offers, and its limits on models and adapters in work at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.requests import RequestRefused, ServedModels
from trireme.config.service import TinkerConfig
from trireme.config.trainer import LoraConfig
from trireme.core.datum import ModelInput


@dataclass(frozen=True)
class ServedTinkerModel:
    """The offered base model, with its names, its adapters and the limits for clients."""

    served: ServedModels
    """Its names (clients see the first), and its sizes."""
    tokenizer_id: str
    """Its tokenizer: a directory, or a name on the hub."""
    options: TinkerConfig
    lora: LoraConfig | None = None
    """The settings of the adapters that are trained; None: the whole model is trained."""
    places: int = 1
    """The number of models that are trained at the same time; 1 unless they are adapters."""
    slots: int = 0
    """The number of adapters that replicas hold at the same time in addition to the base model; 0: they hold the
    weights of one whole model."""

    @property
    def cached_sets(self) -> int:
        """The number of sets of weights kept for samplers, in addition to the base's set and the sets in use."""
        return max(self.options.snapshots, self.slots)

    @property
    def base_model(self) -> str:
        """The first name of the served model."""
        return self.served.names[0]

    @property
    def listed(self) -> tuple[str, ...]:
        """The names of the served model in the list of models."""
        return (self.base_model, *self.options.names)

    @property
    def greeting(self) -> str:
        """A sentence that clients get when they begin a session."""
        lora = self.lora
        if lora is None:
            return "this server trains whole models: lora_config has no effect"
        names = ", ".join(lora.target_modules)
        return f"this server trains adapters up to rank {lora.rank} for {names}; train_unembed has no effect"

    def serves(self, base_model: str | None) -> bool:
        """Returns True if `base_model` is a name of the served model."""
        return base_model in self.served.names

    def room(self, prompt: ModelInput, stop: Sequence[int]) -> int:
        """Returns the number of tokens that may follow a prompt in the model's context. Raises RequestRefused for an
        empty or too long prompt, and for ids in the prompt or in `stop` that the model does not have."""
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
