"""The section `inference`: replicas, engines and sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from trireme.config.section import Section, Share
from trireme.core.transport import TRANSPORTS
from trireme.core.types import SamplingParams

if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal["auto", *TRANSPORTS]


class SamplingConfig(Section):
    max_tokens: PositiveInt = Field(description="Longest answer, in tokens.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature; the trainer divides logits by it too.")
    top_p: Share = Field(1.0, description="Nucleus sampling; below 1 the trainer cannot match the distribution.")
    top_k: int = Field(-1, description="Sample from the k likeliest only; -1 = off. The trainer cannot match it.")
    min_p: Share = Field(0.0, description="Cut below this share of the likeliest; the trainer cannot match it.")
    repetition_penalty: PositiveFloat = Field(1.0, description="1 = off. The trainer cannot match it.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description="Strings that end an answer wherever they come to stand in it, beside what the environment says.",
    )

    def params(self, seed: int, stop: tuple[int | str, ...], room: int) -> SamplingParams:
        """Returns the parameters of one request, whose answer has room for `room` tokens and ends at any of `stop`."""
        own = {"max_tokens": min(self.max_tokens, room), "stop": stop}
        return SamplingParams(**(vars(self) | own), seed=seed)  # model_dump takes ten times as long


class InferenceConfig(Section):
    replicas: PositiveInt = Field(
        1,
        json_schema_extra={"flag": "inference-gpus"},
        description="Number of vLLM replicas (one GPU each where there are GPUs).",
    )
    transport: TransportName = Field("auto", description="How weights travel to the replicas; auto = object_store.")
    on_update: Literal["recompute_kv", "keep_kv", "drain"] = Field(
        "recompute_kv",
        description="What happens to requests in flight when new weights come: their KV cache is computed again under "
        "the new weights; it is kept (shorter pause; the tokens after it come from no policy exactly, and are marked "
        "mixed); or they are finished first, while new ones wait.",
    )
    max_updating: PositiveInt | None = Field(
        None, description="Replicas that take new weights at the same time; none = all, 1 = one after the other."
    )
    sampling: SamplingConfig
    max_model_len: PositiveInt | None = Field(None, description="Context of the engine; none = model.max_seq_len.")
    memory_gb: PositiveFloat = Field(0.25, description="KV cache of a replica on CPUs, in GiB.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Share of a GPU's memory that a replica may take."
    )
    max_num_seqs: PositiveInt | None = Field(
        None, description="Sequences that a replica decodes at once; none = 256 on GPUs, 64 on CPUs."
    )
    spare: bool = Field(
        False,
        description="A process more on each node with replicas, which has all of vLLM imported, no engine and no GPU, "
        "and becomes the successor of a replica that is lost there.",
    )
    engine_args: dict[str, Any] = Field({}, description="Further arguments of vLLM's AsyncEngineArgs.")

    def sequences(self, *, on_gpus: bool) -> int:
        """Returns how many sequences a replica decodes at the same time."""
        return self.max_num_seqs or (256 if on_gpus else 64)
