"""The part of a replica that lives in vLLM's engine process: taking weights, and proving that they are in use.

vLLM imports this module in the engine process because the replica names `WorkerExtension` as its
`worker_extension_cls`. All of it runs between two forward steps.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput

from inference.shipment import Shipment
from trireme.errors import WeightsRefused
from trireme.faults import fault_point
from trireme.weights import TensorEntry, check_received

CANARY_REQUEST = "trireme-canary"
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Received:
    """Weights that have arrived whole, and wait for a pause to be loaded."""

    entries: tuple[TensorEntry, ...]
    buckets: list[npt.NDArray[np.uint8]]


def load(model: torch.nn.Module, received: Received, model_config: Any) -> None:
    """Loads one version whole: fused groups (q, k, v; gate and up) must be loaded together."""
    # Linear weights are packed for the CPU at load and their parameters become empty, so model.load_weights alone
    # would raise half-way. Layerwise reloading restores the parameters, loads, packs, and copies into place.
    initialize_layerwise_reload(model)
    model.load_weights((entry.name, tensor_of(entry, received.buckets)) for entry in received.entries)  # type: ignore[operator]
    finalize_layerwise_reload(model, model_config)
    if fault_point("inference.repack") != "skip":
        repack_output_heads(model)
    if fault_point("inference.loaded") == "corrupt":
        corrupt_one_weight(model)
    torch.accelerator.synchronize()


def tensor_of(entry: TensorEntry, buckets: list[npt.NDArray[np.uint8]]) -> torch.Tensor:
    """The tensor that `entry` describes, as a view of its bucket."""
    flat = torch.from_numpy(buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes])
    return flat.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


def repack_output_heads(model: torch.nn.Module) -> None:
    """Packs the output matrix again from its weight.

    With tied embeddings the output head has no weight of its own in a checkpoint, so layerwise reloading passes it
    over, and on CPUs its packed copy would keep the weights of the first load: logprobs wrong by nats, and no error.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def corrupt_one_weight(model: torch.nn.Module) -> None:
    """Changes one weight of the final norm, on which every logit depends (for tests of the canary)."""
    norms = [p for name, p in model.named_parameters() if name.endswith("norm.weight") and "layers" not in name]
    norms[-1].data[0] += 1.0


class WorkerExtension:
    """Calls that the replica makes in the engine process, beside vLLM's own. Mixed into vLLM's Worker."""

    model_runner: Any
    vllm_config: Any
    received: Received | None = None

    def receive_weights(self, shipment_bytes: bytes) -> str | None:
        """Checks what arrived against its digest; the reason to refuse it, None if it is what was published.

        What was checked stays mapped, and is in memory by then: the pause in which it is loaded needs to fetch nothing.
        """
        shipment: Shipment = pickle.loads(shipment_bytes)
        buckets = shipment.open()
        if fault_point("inference.received") == "corrupt":
            entry = shipment.entries[len(shipment.entries) // 2]
            buckets[entry.bucket][entry.offset] ^= 1
        try:
            check_received(shipment.identity, shipment.entries, buckets)
        except WeightsRefused as refused:
            return str(refused)
        self.received = Received(shipment.entries, buckets)
        return None

    def take_weights(self, canary: list[int]) -> dict[str, Any]:
        """Loads what was received, while the scheduler is paused. `canary_logprobs`: of the tokens `canary` under these
        weights; `tokens_in_flight`: {vLLM's request id: tokens} of each request in the batch, prompt and answer."""
        assert self.received is not None
        runner = self.model_runner
        in_flight = {request: runner.requests[request].num_tokens for request in runner.input_batch.req_ids}
        with set_current_vllm_config(self.vllm_config):
            load(runner.get_model(), self.received, self.vllm_config.model_config)
            self.received = None
            return {"canary_logprobs": self._logprobs(canary), "tokens_in_flight": in_flight}

    def _logprobs(self, tokens: list[int]) -> list[float]:
        """Logprobs of tokens[1:], each given what precedes it, by one prefill through the model runner itself: the
        path that user requests take, with the same packed weights, attention kernels and sampler.

        Only while the scheduler is paused. The pass writes to the first KV blocks (block 0 is vLLM's null block) and
        leaves them as they were: requests in flight may own them, or cached prefixes. Requests fall out of the batch,
        as they do in any step for which they are not scheduled, and come back with the next.
        """
        config = self.model_runner.kv_cache_config
        with unchanged(first_blocks(self.model_runner.kv_caches, config, len(tokens))):
            output = self._run_once(canary_step(tokens, config))
        forget = SchedulerOutput.make_empty()
        forget.finished_req_ids = {CANARY_REQUEST}
        self.model_runner.execute_model(forget)
        logprobs = output.prompt_logprobs_dict[CANARY_REQUEST].logprobs[:, 0]
        return [float(value) for value in logprobs]

    def _run_once(self, step: SchedulerOutput) -> Any:
        output = self.model_runner.execute_model(step)
        if output is None:  # the runner samples in a call of its own
            output = self.model_runner.sample_tokens(None)
        return output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output


def num_blocks(tokens: int, group: Any) -> int:
    return 1 + (tokens - 1) // int(group.kv_cache_spec.block_size)


def first_blocks(kv_caches: list[torch.Tensor], kv_cache_config: Any, tokens: int) -> list[torch.Tensor]:
    """The parts of the layers' caches that the canary writes to, as views: vLLM's caches count blocks first. An
    attention kernel may have smaller blocks, then several rows of a cache make one."""
    blocks = max(num_blocks(tokens, group) for group in kv_cache_config.kv_cache_groups)
    parts = []
    for cache in kv_caches:
        rows, rest = divmod(cache.shape[0], kv_cache_config.num_blocks)
        assert rest == 0, f"a KV cache of shape {tuple(cache.shape)} has no {kv_cache_config.num_blocks} blocks"
        parts.append(cache[rows : rows * (1 + blocks)])
    return parts


@contextmanager
def unchanged(parts: list[torch.Tensor]) -> Iterator[None]:
    """Restores the contents of `parts` at the end."""
    saved = [part.clone() for part in parts]
    yield
    for part, before in zip(parts, saved, strict=True):
        part.copy_(before)


def canary_step(tokens: list[int], kv_cache_config: Any) -> SchedulerOutput:
    """A scheduler's order to prefill `tokens` alone and to report the logprob of each."""
    block_ids = tuple(list(range(1, 1 + num_blocks(len(tokens), group))) for group in kv_cache_config.kv_cache_groups)
    request = NewRequestData(
        req_id=CANARY_REQUEST,
        prompt_token_ids=tokens,
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
        pooling_params=None,
        block_ids=block_ids,
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=tokens,
    )
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [request]
    step.num_scheduled_tokens = {CANARY_REQUEST: len(tokens)}
    step.total_num_scheduled_tokens = len(tokens)
    return step
