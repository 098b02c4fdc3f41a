"""The methods of the sampling client that `trireme.launch` gives to this server. They may be called from any thread,
unlike those of `trireme.core.sampler.Sampler`, and they bring weights too."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from trireme.core.datum import ModelInput
from trireme.core.types import SampleResponse, SamplingParams
from trireme.core.weights import PublishedWeights, UpdateReport


class SamplerVerbs(Protocol):
    """A client of all replicas for programs without an event loop (`inference.sampling_client.SamplingClient`)."""

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
