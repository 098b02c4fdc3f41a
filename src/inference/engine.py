"""vLLM's engine as a replica uses it: its arguments, requests and answers, in the project's own types.

vLLM is imported inside the functions: importing this module must stay cheap for processes that only call replicas.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from inference.cpu.start import CPU_ENVIRONMENT
from inference.engine_startup import prepare_start
from trireme.config import Config
from trireme.config.installed import wrong_build
from trireme.config.trainer import UNEMBED
from trireme.core.errors import BadInput, RoomFailed
from trireme.core.tokenizer import load_tokenizer
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity
from trireme.process.device import find_device
from trireme.process.environ import user_cache

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import SchedulerConfig
    from vllm.logprobs import FlatLogprobs, LogprobsOnePosition, SampleLogprobs
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With this variable PyTorch asks the driver's library for GPUs, and initialises no CUDA, which a fork would break."""
TRITON_CACHE = "TRITON_CACHE_DIR"
HEAD_DTYPE = "head_dtype"
"""The key of the model's configuration in which vLLM looks for the dtype of logits; its values are "float32" and
"model"."""
RESERVED = 1
"""Number of sequences, of all that an engine decodes at the same time, that are reserved for the canary
(`inference.coalescing`)."""
GIVEN_UP = ("abort", "error")
"""vLLM's finish reasons of requests that the engine ended by itself; "error" comes after an exception about the
request."""


def import_engine(*, on_cpu: bool) -> None:
    """Imports vLLM's engine in this process, and sets its environment. Raises BadInput if vLLM was built for GPUs and
    `on_cpu` is true, or the other way round."""
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm.engine.arg_utils
    import vllm.v1.engine.async_llm  # noqa: F401
    from vllm.platforms import current_platform

    import inference.engine_stats  # noqa: F401

    if current_platform.is_cpu() != on_cpu:
        raise wrong_build(on_gpus=not on_cpu)
    if on_cpu:
        os.environ.update(CPU_ENVIRONMENT)
    else:  # else vLLM compiles the same kernels again, for 17 s, for each configuration
        os.environ.setdefault(TRITON_CACHE, str(user_cache() / "triton"))


def start_engine(config: Config, replica_name: str) -> AsyncLLM:
    """Starts vLLM and its engine process on CPUs or a GPU, as `config.cluster.device` says (it is not "auto" any more).
    Returns when the model is loaded. `replica_name`: the name of this replica, for errors and the seed. Raises BadInput
    if this process has no such device, if vLLM was built for the other device, or if `inference.engine_args` sets an
    argument that is decided here."""
    os.environ[NVML_CHECK] = "1"
    on_cpu = find_device(config, replica_name) == "cpu"
    import_engine(on_cpu=on_cpu)
    prepare_start(on_cpu, config.inference.tensor_parallel)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from inference.engine_stats import EngineStats

    arguments = AsyncEngineArgs(**engine_args(config, on_cpu, start=f"{replica_name}/{time.time_ns()}"))
    # For a server vLLM chooses max_num_seqs and max_num_batched_tokens by the GPU (`EngineArgs.get_batch_defaults`);
    # for the engine alone it takes the same few on all of them.
    as_server = UsageContext.OPENAI_API_SERVER
    engine = arguments.create_engine_config(as_server)
    coalesce_outputs(engine.scheduler_config)
    return AsyncLLM.from_vllm_config(
        engine, usage_context=as_server, stat_loggers=[EngineStats], disable_log_stats=arguments.disable_log_stats
    )


def coalesce_outputs(config: SchedulerConfig) -> None:
    """Makes the engine join its outputs into few messages, by choosing a scheduler of `inference.coalescing`. Does
    nothing if `inference.engine_args` names a scheduler."""
    if config.scheduler_cls is None:
        name = f"Coalescing{'Async' if config.async_scheduling else ''}Scheduler"
        config.scheduler_cls = f"inference.coalescing.{name}"


def engine_seed(config: Config, start: str) -> int:
    """Returns the seed that an engine uses for requests without a seed: the run's seed in deterministic mode, else one
    that differs for each `start`. With equal seeds two replicas would draw the same random numbers, and so would a
    lost engine and its successor."""
    if config.deterministic:
        return config.seed
    return int.from_bytes(hashlib.blake2b(f"{config.seed}/{start}".encode(), digest_size=4).digest())  # as numpy takes


def engine_args(config: Config, on_cpu: bool, start: str = "") -> dict[str, Any]:
    """Returns the arguments of vLLM's AsyncEngineArgs. `start` names this start of an engine, for the seed. Raises
    BadInput if `inference.engine_args` sets an argument that is decided here."""
    lora = config.trainer.lora
    ranks = config.inference.tensor_parallel
    sequences = config.inference.sequences(on_gpus=not on_cpu)
    if sequences is not None:
        sequences += RESERVED
    args: dict[str, Any] = {
        "model": config.model.name,
        "dtype": {"auto": "float32" if on_cpu else "bfloat16"}.get(config.model.dtype, config.model.dtype),
        "max_model_len": config.model.max_seq_len,
        "max_num_seqs": sequences,  # None: see `start_engine`
        "scheduling_policy": "priority",  # the canary of an update before all others, these in order of arrival
        "skip_tokenizer_init": True,  # tokens in, tokens out; see `give_tokenizer`
        "generation_config": "vllm",  # the model's own sampling defaults must not change what the trainer assumes
        "logprobs_mode": "processed_logprobs",  # raw ones ignore the temperature
        "worker_extension_cls": "inference.worker.WorkerExtension",
        "tensor_parallel_size": ranks,
        # Inside a placement group vLLM would choose Ray. With "uni" the one rank is the engine's process itself.
        "distributed_executor_backend": "uni" if ranks == 1 else "mp",
        "enable_log_requests": False,
        "disable_log_stats": True,
        "seed": engine_seed(config, start),
    }
    if lora.on:  # adapters on the layers that `inference.adapter` does not merge
        layers = [name for name in lora.target_modules if name not in UNEMBED]
        args |= {"enable_lora": True, "max_lora_rank": lora.rank, "lora_target_modules": layers}
        args |= {"max_loras": config.inference.max_loras, "max_cpu_loras": config.inference.kept_loras}
    if on_cpu:
        # Otherwise every replica reserves a share of all memory, and the second cannot start. The bytes of one rank.
        args["kv_cache_memory_bytes"] = int(config.inference.memory_gb * 2**30) // ranks
        # A seeded request whose prefill is split over several steps crashes vLLM's CPU engine ("CPU Generator does not
        # use offset"). So a prefill, also the one after an update, is computed whole or waits for the next step.
        args["enable_chunked_prefill"] = False
    else:
        args["gpu_memory_utilization"] = config.inference.gpu_memory_utilization
        cache = config.inference.gpu_cache_gb
        if cache is not None:
            args["kv_cache_memory_bytes"] = int(cache * 2**30)
        if config.colocated:
            args["enable_sleep_mode"] = True
            # The memory of CUDA graphs leaves with that of the weights. If only the cache leaves, vLLM would leave the
            # graphs there, and ranks would reduce more slowly within them.
            args["sleep_mode_offload_cudagraph"] = not lora.on
    if config.deterministic:
        args["enable_prefix_caching"] = False  # its contents depend on the earlier requests, and their times
    user_args = config.inference.engine_args
    overrides = user_args.get("hf_overrides", {})
    clash = sorted(args.keys() & user_args.keys()) + [f"hf_overrides.{HEAD_DTYPE}"] * (HEAD_DTYPE in overrides)
    if clash:
        raise BadInput(
            f"inference.engine_args has arguments that Trireme sets itself: {', '.join(clash)}. Remove them from "
            "engine_args. Some have a key of `inference` instead"
        )
    overrides = {"hf_overrides": {**overrides, HEAD_DTYPE: config.model.head_dtype}}
    return {"enforce_eager": on_cpu} | user_args | args | overrides


def end_of_sequence_ids(engine: AsyncLLM) -> list[int]:
    """Returns the end-of-sequence tokens of the model's configuration, ascending. (vLLM takes them from a tokenizer,
    which is not loaded here.)"""
    model = engine.model_config
    ids: set[int] = set()
    for eos in (model.hf_config.eos_token_id, model.try_get_generation_config().get("eos_token_id")):
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return sorted(ids)


def give_tokenizer(engine: AsyncLLM, name: str) -> None:
    """Loads the tokenizer `name` into the engine, once. Only requests with stop strings need the tokenizer, and most
    runs have no such requests. (vLLM itself would load a tokenizer before it starts, or never.)"""
    if engine.output_processor.tokenizer is None:
        engine.output_processor.tokenizer = load_tokenizer(name)


def check_tokens(tokens: npt.NDArray[np.int32], vocab_size: int) -> None:
    """Raises ValueError for a token outside the vocabulary. Without a tokenizer vLLM does not check, and such a token
    kills its engine."""
    if (unknown := tokens[(tokens < 0) | (tokens >= vocab_size)]).size:
        raise ValueError(f"a prompt with the token {unknown[0]}; expected tokens of the vocabulary, below {vocab_size}")


def vllm_params(request: SampleRequest, end_ids: list[int]) -> SamplingParams:
    """Returns vLLM's SamplingParams for `request`. They ask for the final answer alone, with the sampled tokens'
    logprobs, and for its text only if there are stop strings. `end_ids`: tokens that end every answer."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = request.params
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        stop=list(params.stop_strings),
        include_stop_str_in_output=True,
        stop_token_ids=sorted({*params.stop_token_ids, *end_ids}),
        logprobs=0,
        flat_logprobs=True,  # a number for each token, not a dict and an object
        prompt_logprobs=request.topk_prompt_logprobs if request.wants_prompt_logprobs else None,
        detokenize=bool(params.stop_strings),
        skip_special_tokens=False,  # a string may be that of a special token
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # made for one request: vLLM need not copy all that is in it
    )


def sampled_logprobs(logprobs: SampleLogprobs | None, start: int, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Returns the logprobs of `tokens`, T successive tokens of an answer, as float32 [T]. `start`: the index in the
    answer of the first of `tokens`.

    `logprobs`: vLLM's logprobs of the whole answer, one entry for each token, because the request asked for no
    alternative tokens. Raises RoomFailed if the entries belong to other tokens.
    """
    flat = cast("FlatLogprobs", logprobs)  # as `vllm_params` asks for
    end = start + len(tokens)
    if flat.token_ids[start:end] != tokens:
        raise RoomFailed(f"vLLM sampled the tokens {tokens}, but gave logprobs of {flat.token_ids[start:end]}")
    return np.asarray(flat.logprobs[start:end], dtype=np.float32)


def tables_of(logprobs: Iterable[LogprobsOnePosition | None] | None) -> list[LogprobsOnePosition]:
    """Returns vLLM's tables {token: logprob}, one for each token of a prompt except the first token, which has no
    table."""
    assert logprobs is not None
    return [table for table in logprobs if table]


def prompt_logprobs(tokens: npt.NDArray[np.int32], output: RequestOutput) -> npt.NDArray[np.float32]:
    """Returns the logprobs of tokens[1:], float32 [T - 1], from vLLM's answer to the prompt `tokens`, int32 [T]."""
    pairs = zip(tokens[1:].tolist(), tables_of(output.prompt_logprobs), strict=True)
    return np.asarray([table[token].logprob for token, table in pairs], dtype=np.float32)


def sampled_sequence(
    request: SampleRequest, output: RequestOutput, kept_from: WeightIdentity | None
) -> SampledSequence:
    """Converts vLLM's final RequestOutput to the project's type. Raises RoomFailed unless the output's version spans
    cover every token, and ValueError if the engine itself ended the request.

    `kept_from`: None unless `inference.on_update` is keep_kv. With keep_kv, the KV cache outlives updates: `kept_from`
    names the oldest weights that may have computed a part of the request's cache, and a span that was sampled by other
    weights is marked as mixed.
    """
    completion = output.outputs[0]
    if completion.finish_reason in GIVEN_UP:
        raise ValueError(
            f"the engine ended the request with {completion.finish_reason!r}; the log of the replica says why"
        )
    tokens = np.asarray(completion.token_ids, dtype=np.int32)
    logprobs = sampled_logprobs(completion.logprobs, 0, list(completion.token_ids))
    identities = [WeightIdentity.parse(span.version) for span in completion.weight_versions or ()]
    spans = tuple(
        VersionSpan(identity, span.start, span.end, mixed=kept_from not in (None, identity))
        for identity, span in zip(identities, completion.weight_versions or (), strict=True)
    )
    edges = [0, *(edge for span in spans for edge in (span.start, span.end)), len(tokens)]
    if any(end != start for end, start in zip(edges[0::2], edges[1::2], strict=True)):
        raise RoomFailed(f"{request.request_id}: version spans {spans} do not cover its {len(tokens)} tokens")
    chosen: list[float | None] | None = None
    likeliest: list[list[tuple[int, float]] | None] | None = None
    if request.wants_prompt_logprobs:  # one table for each token of the prompt but the first
        k = request.topk_prompt_logprobs
        tables = tables_of(output.prompt_logprobs)
        if request.prompt_logprobs:
            pairs = zip(request.prompt[1:].tolist(), tables, strict=True)
            chosen = [None, *(table[token].logprob for token, table in pairs)]
        if k:
            ranked = [
                sorted((candidate.rank, token, candidate.logprob) for token, candidate in table.items())
                for table in tables
            ]
            likeliest = [None, *([row[1:] for row in rows[:k]] for rows in ranked)]
    return SampledSequence(
        tokens,
        logprobs,
        "length" if completion.finish_reason == "length" else "stop",
        spans,
        chosen,
        likeliest,
    )
