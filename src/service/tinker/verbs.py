"""The rooms as this server sees them: their verbs. `trireme.launch` hands it the trainer and the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from trireme.core.datum import Datum, ModelInput
from trireme.core.types import (
    AdamParams,
    ForwardBackwardOutput,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
    WeightIdentity,
)
from trireme.core.weights import AdapterSpec, PublishedWeights, UpdateReport
from trireme.run.commits import StatefulTrainer


class TrainerVerbs(StatefulTrainer, Protocol):
    """The trainer (`trainer.handle.TrainerHandle`). Every verb waits, and raises TriremeError."""

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> ForwardBackwardOutput: ...

    def forward(self, data: Sequence[Datum]) -> ForwardBackwardOutput: ...

    def optim_step(self, adam_params: AdamParams) -> OptimStepResponse: ...

    def drop_gradients(self) -> None: ...

    def reset_optimizer(self) -> None: ...

    def load_state(self, path: Path, identities: Sequence[WeightIdentity]) -> str: ...

    def add_adapter(self, name: str, spec: AdapterSpec, start: Path | None = None) -> None: ...

    def use_adapter(self, name: str) -> None: ...

    def drop_adapter(self, name: str) -> None: ...


class SamplerVerbs(Protocol):
    """The sampler in front of all replicas (`inference.client.SamplingClient`)."""

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        adapter: str = "",
    ) -> Future[SampleResponse]: ...

    def update_weights(self, weights: PublishedWeights) -> list[UpdateReport]: ...

    def load_adapter(self, name: str, weights: PublishedWeights) -> None: ...

    def drop_adapter(self, name: str) -> None: ...
