"""Answers of a model to a list of prompts, by vLLM in this process. No weights travel; the model stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TextIO

import numpy as np
from tqdm.auto import tqdm

from inference.engine import give_tokenizer, import_engine, vllm_params
from trireme.core.types import SampleRequest, SamplingParams
from trireme.process.device import Device

CPU_KV_CACHE_BYTES = 2**30


class OfflineEngine:
    """vLLM with `model`, a directory or a name on the hub. Prompts and answers are token ids."""

    def __init__(
        self, model: str, seed: int, max_model_len: int | None, gpu_memory_utilization: float, device: Device
    ) -> None:
        """Raises BadInput for a build of vLLM that is not for `device`."""
        import_engine(on_cpu=device == "cpu")
        from vllm import LLM, EngineArgs

        on_cpu = device == "cpu"
        # As for a replica: see inference.engine.
        args = EngineArgs(
            model=model,
            dtype="float32" if on_cpu else "bfloat16",
            skip_tokenizer_init=True,
            generation_config="vllm",
            seed=seed,
            disable_log_stats=True,
        )
        if max_model_len is not None:
            args.max_model_len = max_model_len
        if on_cpu:
            args.kv_cache_memory_bytes, args.enable_chunked_prefill = CPU_KV_CACHE_BYTES, False
            args.enforce_eager = True
        else:
            args.gpu_memory_utilization = gpu_memory_utilization
        self._model = model
        self._llm = LLM.from_engine_args(args)

    def answers(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], progress: TextIO
    ) -> list[list[int] | None]:
        """Returns the tokens of one answer to each prompt; None for one that was cut at `max_tokens`. Draws a bar on
        `progress`."""
        from vllm.inputs import TokensPrompt

        if any(each.stop_strings for each in params):
            give_tokenizer(self._llm.llm_engine, self._model)
        requests = [
            SampleRequest("", np.asarray(p, np.int32), each, "") for p, each in zip(prompts, params, strict=True)
        ]
        asked = [TokensPrompt(prompt_token_ids=request.prompt.tolist()) for request in requests]
        bar = partial(tqdm, file=progress)
        outputs = self._llm.generate(asked, [vllm_params(request, []) for request in requests], use_tqdm=bar)
        ends = [output.outputs[0] for output in outputs]
        return [None if end.finish_reason == "length" else list(end.token_ids) for end in ends]
