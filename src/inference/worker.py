"""The part of a replica that lives in vLLM's engine process: taking weights, and proving that they are in use.

vLLM imports this module in the engine process because the replica names `WorkerExtension` as its
`worker_extension_cls`; the import registers the weight transfer engine. All of it runs between two forward steps.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput

from inference.shipment import Shipment
from trireme.errors import WeightsRefused
from trireme.faults import fault_point
from trireme.weights import TensorEntry, check_received

BACKEND = "trireme"
CANARY_REQUEST = "trireme-canary"
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to set up: buckets come as files in memory."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`shipment`: a pickled `Shipment` (vLLM's calls between processes carry bytes, not classes)."""

    shipment: bytes


class BucketTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads the tensors of one version out of byte buckets, by vLLM's life cycle start - update - finish.

    The whole version comes in one `update_weights`: fused groups (q, k, v; gate and up) must be loaded together, and
    layerwise reloading keeps references to the tensors until their layer is complete.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        # Linear weights are packed for the CPU at load and their parameters become empty, so model.load_weights alone
        # would raise half-way. Layerwise reloading restores the parameters, loads, packs, and copies into place.
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        shipment: Shipment = pickle.loads(update_info.shipment)
        buckets = shipment.open()
        self.model.load_weights((entry.name, tensor_of(entry, buckets)) for entry in shipment.entries)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if fault_point("inference.repack") != "skip":
            repack_output_heads(self.model)
        if fault_point("inference.loaded") == "corrupt":
            corrupt_one_weight(self.model)

    def shutdown(self) -> None:
        pass


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

    def refusal_of(self, shipment_bytes: bytes) -> str | None:
        """Checks what arrived against its digest; the reason to refuse it, None if it is what was published."""
        shipment: Shipment = pickle.loads(shipment_bytes)
        buckets = shipment.open()
        if fault_point("inference.received") == "corrupt":
            entry = shipment.entries[len(shipment.entries) // 2]
            buckets[entry.bucket][entry.offset] ^= 1
        try:
            check_received(shipment.identity, shipment.entries, buckets)
        except WeightsRefused as refused:
            return str(refused)
        return None

    def tokens_in_flight(self) -> dict[str, int]:
        """Tokens (prompt and answer so far) of each request that holds KV blocks: {vLLM's request id: tokens}."""
        runner = self.model_runner
        return {request: runner.requests[request].num_tokens for request in runner.input_batch.req_ids}

    def canary_logprobs(self, tokens: list[int]) -> list[float]:
        """Logprobs of tokens[1:], each given what precedes it, by one prefill through the model runner itself.

        Only while the scheduler is paused with its cache cleared: then no request owns a KV block, and the pass may
        write to the first ones (block 0 is vLLM's null block). Requests that were running are resumed by vLLM with
        new blocks and a full prefill, so nothing they read is touched. The path is the one that user requests take:
        the same packed weights, attention kernels and sampler.
        """
        with set_current_vllm_config(self.vllm_config):
            output = self._run_once(canary_step(tokens, self.model_runner.kv_cache_config))
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


def canary_step(tokens: list[int], kv_cache_config: Any) -> SchedulerOutput:
    """A scheduler's order to prefill `tokens` alone and to report the logprob of each."""
    block_ids = tuple(
        list(range(1, 2 + (len(tokens) - 1) // group.kv_cache_spec.block_size))
        for group in kv_cache_config.kv_cache_groups
    )
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


if BACKEND not in WeightTransferEngineFactory._registry:  # registering a name twice raises
    WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)
