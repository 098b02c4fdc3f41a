"""vLLM's engine as a replica uses it: its arguments, its requests and its answers, in the project's own types.

vLLM is imported inside the functions: importing this module must stay cheap for the processes that only call replicas.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from inference.engine_startup import prepare_start
from trireme.config import Config
from trireme.config.schema import LoraConfig
from trireme.config.trainer import UNEMBED
from trireme.core.errors import BadInput, RoomFailed
from trireme.core.tokenizer import load_tokenizer
from trireme.core.types import SampledSequence, SampleRequest, StopReason, VersionSpan, WeightIdentity

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

CPU_ENVIRONMENT = {
    # the engine process runs the model itself: two processes a replica instead of three
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # "auto" would bind every replica of a machine to the same cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def import_engine() -> bool:
    """Imports vLLM, as far as a start needs it in the process that asks for it; whether it is vLLM's CPU build."""
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm.engine.arg_utils
    import vllm.v1.engine.async_llm  # noqa: F401
    from vllm.platforms import current_platform

    import inference.engine_stats  # noqa: F401

    on_cpu: bool = current_platform.is_cpu()
    if on_cpu:
        os.environ.update(CPU_ENVIRONMENT)
    return on_cpu


def start_engine(cfg: Config) -> AsyncLLM:
    """Starts vLLM and its engine process; returns when the model is loaded."""
    on_cpu = import_engine()
    prepare_start(on_cpu)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from inference.engine_stats import EngineStats

    arguments = AsyncEngineArgs(**engine_args(cfg, on_cpu))
    return AsyncLLM.from_engine_args(arguments, stat_loggers=[EngineStats])


def engine_args(cfg: Config, on_cpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs. Raises BadInput for `inference.engine_args` that are decided here."""
    args: dict[str, Any] = {
        "model": cfg.model.name,
        "dtype": {"auto": "float32" if on_cpu else "bfloat16"}.get(cfg.model.dtype, cfg.model.dtype),
        "max_model_len": cfg.inference.max_model_len or cfg.model.max_seq_len,
        "max_num_seqs": cfg.inference.sequences(on_gpus=not on_cpu),
        "scheduling_policy": "priority",  # equal ones in order of arrival; the canary of an update before all others
        "skip_tokenizer_init": True,  # tokens in, tokens out; see `give_tokenizer`
        "generation_config": "vllm",  # the model's own sampling defaults must not change what the trainer assumes
        "logprobs_mode": "processed_logprobs",  # raw ones ignore the temperature
        "worker_extension_cls": "inference.worker.WorkerExtension",
        "distributed_executor_backend": "uni",  # inside a placement group vLLM would choose Ray
        "enable_log_requests": False,
        "disable_log_stats": True,
        "seed": cfg.seed,
    }
    args |= lora_args(cfg.trainer.lora)
    args |= cpu_args(cfg) if on_cpu else {"gpu_memory_utilization": cfg.inference.gpu_memory_utilization}
    if cfg.deterministic:
        args["enable_prefix_caching"] = False  # what is cached depends on what was asked before, and when
    if clash := sorted(args.keys() & cfg.inference.engine_args.keys()):
        raise BadInput(
            f"inference.engine_args sets {', '.join(clash)}, which other keys or Trireme decide: leave it out"
        )
    return {"enforce_eager": on_cpu} | cfg.inference.engine_args | args


def lora_args(lora: LoraConfig) -> dict[str, Any]:
    """One adapter, on the layers that `inference.adapter` does not merge."""
    if not lora.on:
        return {}
    layers = [name for name in lora.target_modules if name not in UNEMBED]
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora.rank, "lora_target_modules": layers}


def cpu_args(cfg: Config) -> dict[str, Any]:
    """What the CPU build needs besides."""
    return {
        # otherwise every replica reserves a share of all memory, and the second can not start
        "kv_cache_memory_bytes": int(cfg.inference.memory_gb * 2**30),
        # A seeded request whose prefill is split over several steps crashes vLLM's CPU engine ("CPU Generator does not
        # use offset"). So a prefill, the one after an update too, is computed whole or waits for the next step.
        "enable_chunked_prefill": False,
    }


def end_of_sequence_ids(engine: AsyncLLM) -> list[int]:
    """The model's own end-of-sequence tokens (vLLM learns them from a tokenizer, which is not loaded here)."""
    config = engine.model_config
    found: set[int] = set()
    for eos in (config.hf_config.eos_token_id, config.try_get_generation_config().get("eos_token_id")):
        found.update([eos] if isinstance(eos, int) else eos or [])
    return sorted(found)


def give_tokenizer(engine: AsyncLLM, name: str) -> None:
    """From here on requests may be ended by strings. Opened for the first of them only: most runs have none."""
    if engine.output_processor.tokenizer is None:
        engine.output_processor.tokenizer = load_tokenizer(name)


def vllm_params(request: SampleRequest, end_ids: list[int]) -> Any:
    """vLLM's SamplingParams: only the final answer, with the sampled tokens' logprobs. It is not detokenised unless
    strings end it."""
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
        prompt_logprobs=request.topk_prompt_logprobs if request.wants_prompt_logprobs else None,
        detokenize=bool(params.stop_strings),
        skip_special_tokens=False,  # a string may be that of a special token
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def policy_adapter() -> LoRARequest:
    """What requests name, to be answered by the adapter that the engine has taken."""
    from inference.adapter import POLICY

    return POLICY


def canary_params() -> Any:
    """vLLM's SamplingParams of the canary: the logprob of each token of its prompt, and the least that vLLM samples."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def prompt_logprobs(tokens: Sequence[int], output: Any) -> npt.NDArray[np.float32]:
    """Of tokens[1:], each given what precedes it, float32 [T - 1], as vLLM's final RequestOutput has them."""
    pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    return np.asarray([at[token].logprob for token, at in pairs], dtype=np.float32)


def sampled_sequence(request: SampleRequest, output: Any, kept_from: WeightIdentity | None) -> SampledSequence:
    """What vLLM's final RequestOutput says. Raises RoomFailed unless its version spans cover every token.

    `kept_from`: the weights under which the request entered, where its KV cache outlives them (`keep_kv`), else None.
    """
    completion = output.outputs[0]
    tokens = np.asarray(completion.token_ids, dtype=np.int32)
    logprobs = [at[int(token)].logprob for at, token in zip(completion.logprobs, tokens, strict=True)]
    spans = tuple(version_span(span, kept_from) for span in completion.weight_versions or ())
    check_spans(request.request_id, spans, len(tokens))
    reason: StopReason = "length" if completion.finish_reason == "length" else "stop"
    sampled = SampledSequence(tokens, np.asarray(logprobs, dtype=np.float32), reason, spans)
    return with_prompt_logprobs(sampled, request, output) if request.wants_prompt_logprobs else sampled


def with_prompt_logprobs(sampled: SampledSequence, request: SampleRequest, output: Any) -> SampledSequence:
    """The same, with what vLLM's final RequestOutput says of the prompt: a table of the likeliest tokens and of the one
    that is there, at each place but the first."""
    k, tables = request.topk_prompt_logprobs, output.prompt_logprobs[1:]
    own = [at[token].logprob for token, at in zip(request.prompt[1:], tables, strict=True)]
    likeliest = [sorted((each.rank, token, each.logprob) for token, each in at.items())[:k] for at in tables]
    return replace(
        sampled,
        prompt_logprobs=[None, *own] if request.prompt_logprobs else None,
        topk_prompt_logprobs=[None, *([row[1:] for row in rows] for rows in likeliest)] if k else None,
    )


def version_span(span: Any, kept_from: WeightIdentity | None) -> VersionSpan:
    identity = WeightIdentity.parse(span.version)
    return VersionSpan(identity, span.start, span.end, mixed=kept_from not in (None, identity))


def check_spans(request_id: str, spans: tuple[VersionSpan, ...], num_tokens: int) -> None:
    """Raises RoomFailed unless `spans` cover [0, num_tokens) in order, without gap or overlap."""
    edges = [0, *(edge for span in spans for edge in (span.start, span.end)), num_tokens]
    if any(left != right for left, right in zip(edges[0::2], edges[1::2], strict=True)):
        raise RoomFailed(f"{request_id}: version spans {spans} do not cover its {num_tokens} tokens")
