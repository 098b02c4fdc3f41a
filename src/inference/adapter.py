"""LoRA adapters in vLLM's engine process. Each update replaces the values of the policy's adapter in place, between two
steps; the values of other adapters do not change (`inference.replica_set.actor`).

vLLM's own way to new values is another adapter under another name. Requests in flight would have to be aborted and sent
again under that name, and a seeded request would draw the same random numbers twice. In place, an adapter is updated
like whole weights: requests continue, their spans say from which token on, and each `inference.on_update` has its usual
meaning. Prefixes computed with older values are not served: requests share caches under equal salts only, and a salt
names the weights.

The output matrix is different: vLLM applies its adapter to sampled tokens only, and the canary checks the tokens of a
prompt. So its adapter is merged into the matrix, and a copy of the original matrix is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from trireme.core.errors import WeightsRefused
from trireme.core.weights import Adapter

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    from inference.following import TensorFollower

    ModelRunner: TypeAlias = RunnerV1 | RunnerV2
    """vLLM takes V2 on CUDA, unless a feature is on that it lacks; the runner for CPUs is derived from V1."""

_HEAD = "base_model.model.lm_head.lora_{}.weight"
_ORIGINALS: WeakKeyDictionary[ParallelLMHead, torch.Tensor] = WeakKeyDictionary()
"""Output matrices without an adapter."""
POLICY = LoRARequest("policy", 1, "in memory")
"""The policy's adapter, which every request without another adapter names once an update has brought one. vLLM reads no
file of that name: it has the adapter."""


def request_of(name: str, number: int) -> LoRARequest:
    """Returns a LoRARequest, the object by which a sampling request tells vLLM which adapter to use. `name`: the
    adapter's name. `number`: the number under which vLLM holds the adapter."""
    return LoRARequest(name, number, "in memory")


def add_adapter(runner: ModelRunner, number: int, tensors: Mapping[str, torch.Tensor], adapter: Adapter) -> None:
    """Gives vLLM's model runner one more adapter, between two steps. `number`: a number that no adapter has had.
    `tensors`: {peft's name: tensor}; their values are copied. Raises WeightsRefused if the adapter has tensors for the
    output matrix."""
    if any(name in tensors for name in map(_HEAD.format, "AB")):
        raise WeightsRefused(
            "the added adapter has tensors of lm_head, but a replica has only one lm_head for all requests. Train the "
            "adapter without lm_head (trainer.lora.train_unembed, trainer.lora.targets)"
        )
    manager = runner.lora_manager._adapter_manager
    dtype = manager.lora_config.lora_dtype
    assert isinstance(dtype, torch.dtype), "vLLM replaces `auto` and names as it starts"
    scale = adapter.alpha / adapter.rank
    # In host memory, from which vLLM copies an adapter to one of `max_loras` places on the device when a step needs it.
    layers = {
        name: tensor.to("cpu", copy=True) * (scale if ".lora_B." in name else 1.0) for name, tensor in tensors.items()
    }
    helper = PEFTHelper(r=adapter.rank, lora_alpha=adapter.rank, target_modules=[])
    manager.add_adapter(LoRAModel.from_lora_tensors(number, layers, helper, "cpu", dtype))


def drop_adapter(runner: ModelRunner, number: int) -> None:
    """Removes the adapter `number` from vLLM's model runner; no request may name it any more."""
    runner.lora_manager._adapter_manager.remove_adapter(number)


def stacks(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns {name: tensor} of the tensors in which a layer of vLLM holds its adapters: the A matrices of all adapters
    are stacked in some of them, the B matrices in others."""
    kinds = ("lora_a_stacked", "lora_b_stacked")
    return {f"{kind}.{i}": tensor for kind in kinds for i, tensor in enumerate(getattr(layer, kind, ()))}


def take_adapter(
    runner: ModelRunner,
    follower: TensorFollower,
    tensors: Mapping[str, torch.Tensor],
    adapter: Adapter,
    *,
    traced: bool,
) -> dict[str, str]:
    """Replaces the values of the policy's adapter in vLLM's model runner, while the scheduler is paused. `tensors`:
    {peft's name: tensor}. `follower`: a TensorFollower that was made with the function `stacks`. It observes the load,
    and can then compute checksums of the loaded values. `traced`: True if an earlier update recorded where vLLM's
    loaders copy the tensors, and the replica accepted the record (`LoadedProof.traced`). If it is False, `follower`
    makes a new record during this load. Returns {tensor whose values `follower` cannot find in the model: reason}."""
    # vLLM's public way, `add_lora`, reads files of a directory: a second copy on a disk, which has no digest.
    manager = runner.lora_manager._adapter_manager
    dtype = manager.lora_config.lora_dtype
    assert isinstance(dtype, torch.dtype), "vLLM replaces `auto` and names as it starts"
    layers = {name: tensor.to(manager.device) for name, tensor in tensors.items()}
    a, b = (layers.pop(_HEAD.format(which), None) for which in "AB")
    unfollowed = dict.fromkeys(tensors.keys() - layers.keys(), "merged into the output matrix")
    # Scaled here, and not where vLLM would do it, in the memory of the tensors that it is given.
    scale = adapter.alpha / adapter.rank
    scaled = [name for name in layers if ".lora_B." in name]
    layers |= {name: layers[name] * scale for name in scaled}
    if math.frexp(scale)[0] != 0.5:  # no power of two
        unfollowed |= dict.fromkeys(scaled, "scaled by alpha / rank, which rounds")
    helper = PEFTHelper(r=adapter.rank, lora_alpha=adapter.rank, target_modules=[])
    with follower.following(layers, traced=traced, factors=dict.fromkeys(scaled, scale)) as followed:
        lora = LoRAModel.from_lora_tensors(POLICY.lora_int_id, dict(followed), helper, str(manager.device), dtype)
        manager.remove_adapter(lora.id)
        manager.add_adapter(lora)
        manager.activate_adapter(lora.id)
    if a is None or b is None:
        return unfollowed
    added = (b.float() @ a.float()) * (adapter.alpha / adapter.rank)  # without rows for padding of the vocabulary
    head = next(module for module in runner.get_model().modules() if isinstance(module, ParallelLMHead))
    shard = head.shard_indices  # the part of the vocabulary that this rank holds
    added = added[shard.org_vocab_start_index : shard.org_vocab_end_index]
    weight = head.get_parameter("weight").data
    if head not in _ORIGINALS:
        _ORIGINALS[head] = weight.clone()
    merged = _ORIGINALS[head].clone()
    merged[: len(added)] = (merged[: len(added)].float() + added.to(merged.device)).to(merged.dtype)
    weight.copy_(merged)
    head.quant_method.process_weights_after_loading(head)  # on CPUs: packs it again
    return unfollowed
