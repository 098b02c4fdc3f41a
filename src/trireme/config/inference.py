"""The section `inference`: replicas, engines and sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from trireme.config.section import NAMES_CODE, Section
from trireme.core.sampling_bounds import BOUNDS, LONGEST_STOP, MOST_STOPS
from trireme.core.transport import TRANSPORTS
from trireme.core.types import SamplingParams

if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal["auto", *TRANSPORTS]

Temperature = Annotated[float, Field(ge=0.01, le=BOUNDS["temperature"].largest)]
"""The trainer divides by it, and vLLM samples at 0.01 where less is asked for."""
GIB = 2**30
GPU_SEQUENCES = 256
LARGE_GPU_SEQUENCES = 1024
LARGE_GPU_BYTES = 70 * GIB
"""A server of vLLM 0.32 decodes LARGE_GPU_SEQUENCES sequences at the same time on a GPU with at least LARGE_GPU_BYTES
of memory, and GPU_SEQUENCES on a smaller GPU; also on an A100, even with 80 GiB."""
CPU_SEQUENCES = 256
"""Default number of sequences that a replica on CPUs decodes at once (docs/internals/benchmarks.md, defaults)."""


class SamplingConfig(Section):
    max_tokens: PositiveInt
    """Longest answer, in tokens."""
    temperature: Temperature = 1.0
    """Sampling temperature; the trainer divides logits by it too."""
    top_p: Annotated[float, BOUNDS["top_p"].field] = 1.0
    """Nucleus sampling; below 1 the trainer cannot match the distribution."""
    top_k: Annotated[int, BOUNDS["top_k"].field] = -1
    """Sample from the k likeliest only; -1 = off. The trainer cannot match it."""
    min_p: Annotated[float, BOUNDS["min_p"].field] = 0.0
    """Cut below this share of the likeliest; the trainer cannot match it."""
    repetition_penalty: Annotated[float, BOUNDS["repetition_penalty"].field] = 1.0
    """1 = off. The trainer cannot match it."""
    stop: list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]] = Field([], max_length=MOST_STOPS)
    """Strings that end an answer wherever they appear in it, in addition to the environment's."""

    def params(self, seed: int | None, stop: tuple[int | str, ...], room: int) -> SamplingParams:
        """Returns the sampling parameters of one request. `room`: the most tokens that fit after the prompt; the answer
        has at most `room` tokens, and at most the option `max_tokens`. `stop`: tokens and strings that end the answer;
        they replace the option `stop`."""
        overrides = {"max_tokens": min(self.max_tokens, room), "stop": stop}
        return SamplingParams(**(vars(self) | overrides), seed=seed)  # model_dump takes ten times as long


class InferenceConfig(Section):
    replicas: PositiveInt = 1
    """Number of vLLM replicas (tensor_parallel GPUs each where there are GPUs)."""
    tensor_parallel: PositiveInt = 1
    """Ranks of a replica, on one node: each holds a part of every layer, and has one GPU where there are GPUs."""
    transport: TransportName = "auto"
    """How weights travel to the replicas. object_store: each machine with a replica fetches one copy from Ray's store.
    broadcast: each trainer shard sends all weights to the replicas of its nodes, by gloo on CPUs and NCCL on GPUs (not
    tried on several GPUs yet); a replica that is not ready in time fetches them from the shards, as all do for the rest
    of the run if NCCL fails at one of the first two versions. ipc: like broadcast, but a replica on the GPU of the
    shard that serves it (on CPUs: on its machine) copies them from memory that both map (not run on a GPU yet). auto,
    for whole weights: ipc where trainer and replica share a GPU and receive_on is gpu, broadcast on several GPUs of one
    machine; else object_store."""
    receive_on: Literal["auto", "gpu", "host"] = "auto"
    """Where weights that arrive at a replica on GPUs wait for the pause in which they are loaded. gpu: in a second
    buffer for all weights, on each of its GPUs (not run on a GPU yet). host: in host memory, from which the pause
    copies them. auto: gpu where that leaves nine tenths of the KV cache. LoRA adapters always wait in host memory."""
    encoding: Literal["auto", "dense", "delta"] = "auto"
    """What travels. dense: all weights. delta: the words that changed since the version before, which the replicas have
    in host memory (a version more for each replica); replicas that miss it get all weights. Few words of 16-bit weights
    change in a step with a small learning rate, of float32 weights and of adapters most. With broadcast, changes travel
    by gloo, also between GPUs; ipc sends none. auto: delta with object_store on several machines where weights have 16
    bits and are no adapters, else dense."""
    on_update: Literal["auto", "recompute_kv", "keep_kv", "drain"] = "auto"
    """How requests in flight take new weights: recompute_kv computes their KV cache again under the new weights;
    keep_kv keeps it (a shorter pause, but later tokens come from no exact policy, and are marked mixed); drain finishes
    them first, while new ones wait. auto: keep_kv on GPUs where the plan expects that computing again costs more than
    0.3 of a step's training, else recompute_kv; a resumed run keeps what was decided."""
    sampling: SamplingConfig
    memory_gb: PositiveFloat = 0.25
    """KV cache of a replica on CPUs, in GiB; its ranks share it."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that a replica, or its rank on that GPU, may take; where trainer and replica take turns,
    together with the trainer's state."""
    gpu_cache_gb: PositiveFloat | None = None
    """KV cache of a replica on its GPU (on each of several), in GiB; none = the size for max_num_seqs sequences of full
    length and prefix_cache, but at most the memory that gpu_memory_utilization leaves: by vLLM's measurement, or by the
    plan's estimate on a GPU shared with the trainer, where nothing can be measured while both start."""
    prefix_cache: NonNegativeFloat = 1.0
    """Space on GPUs for prefixes of conversations that no sequence is decoding, as a multiple of the space for
    max_num_seqs sequences of full length; see gpu_cache_gb."""
    max_num_seqs: PositiveInt | None = None
    """Sequences that a replica decodes at the same time; none = on a GPU the default of a vLLM server there (256, or
    1,024 from 70 GiB of memory on, in vLLM 0.32), one of them for the canary of updates; 256 on CPUs."""
    max_loras: PositiveInt = 1
    """Adapters that a replica decodes in the same step (vLLM's max_loras). A run has one, and `trireme serve` with
    trainer.lora one for each set of weights that it samples from; requests for further adapters take turns."""
    max_cpu_loras: PositiveInt | None = None
    """Adapters that a replica keeps in host memory (vLLM's max_cpu_loras), at least max_loras; further adapters are
    loaded when a place there is free. none = max_loras."""
    answer_s: PositiveFloat = 1800.0
    """Seconds for one answer, from its request to its last token, with the pauses of updates; then the rollout is tried
    again. orchestrator.generation_timeout_s bounds all turns of a rollout together."""
    engine_args: dict[str, Any] = Field({}, json_schema_extra=NAMES_CODE)
    """Further arguments of vLLM's AsyncEngineArgs."""

    @property
    def kept_loras(self) -> int:
        """The number of adapters that a replica keeps in host memory."""
        return max(self.max_cpu_loras or 0, self.max_loras)

    def sequences(self, *, on_gpus: bool) -> int | None:
        """Returns the maximum number of sequences that a replica decodes at the same time; None if vLLM chooses a
        number that fits the GPU."""
        return self.max_num_seqs or (None if on_gpus else CPU_SEQUENCES)

    def most_gpu_sequences(self, gpu_bytes: int) -> int:
        """Returns the most sequences that a replica decodes at the same time on a GPU with `gpu_bytes` of memory."""
        if gpu_bytes >= LARGE_GPU_BYTES:
            default = LARGE_GPU_SEQUENCES
        else:
            default = GPU_SEQUENCES
        return self.max_num_seqs or default
