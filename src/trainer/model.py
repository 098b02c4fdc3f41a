"""The policy as the trainer holds it: a Hugging Face causal language model, sharded by FSDP2 layer by layer.

Master weights are float32 (`trainer.master_dtype`). With another inference dtype FSDP casts parameters when it gathers
a layer, so that the trainer computes with the very values that replicas get; gradients are reduced in float32, and
*summed* over ranks, because losses are raw sums over tokens. With `trainer.replicate` the mesh has two dimensions:
parameters are spread over one, and gradients summed over both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightTransform, revert_weight_conversion

from trainer.attention import PACKED, has_kernel
from trainer.logprobs import add_token_logprobs
from trainer.lora import add_adapters, start_values
from trireme.config import CommonConfig
from trireme.config.model_facts import ModelFacts
from trireme.config.schema import LoraConfig
from trireme.core.errors import BadInput
from trireme.plan.memory import ModelMemory

SHARD, REPLICATE = "shard", "replicate"
"""Dimensions of the mesh."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Sharding:
    """How a model is held and computed. `mesh`: over all ranks, its last dimension being that over which parameters
    are spread. `dtype` computes, `master` is what is trained. Of more than `kept_tokens` at once a layer keeps only its
    input, and is computed again in the backward pass. `whole`: see `accumulating`."""

    mesh: DeviceMesh
    dtype: torch.dtype
    master: torch.dtype
    attention: str
    kept_tokens: int | None
    compiled: bool
    whole: bool
    offload: OffloadPolicy

    @classmethod
    def of(cls, config: CommonConfig, facts: ModelFacts, device: torch.device) -> Sharding:
        """As configured, over all ranks of the process group. Collective."""
        options, dtype = config.trainer, inference_dtype(config.model.dtype, device)
        memory = ModelMemory(facts, dtype.itemsize, on_gpus=device.type == "cuda")
        return cls(
            mesh=_mesh(device, options.replicate),
            dtype=dtype,
            master=DTYPES[options.master_dtype],
            attention=_attention(config, device, dtype),
            kept_tokens=memory.kept_tokens(options.checkpointing),
            compiled=options.compile,
            whole=memory.stays_whole,
            offload=CPUOffloadPolicy(pin_memory=device.type == "cuda") if options.offload == "cpu" else OffloadPolicy(),
        )

    @property
    def packed(self) -> bool:
        return self.attention == PACKED


def _mesh(device: torch.device, replicate: int) -> DeviceMesh:
    if replicate == 1:
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(SHARD,))
    shape = (replicate, dist.get_world_size() // replicate)
    return init_device_mesh(device.type, shape, mesh_dim_names=(REPLICATE, SHARD))


def _attention(config: CommonConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Name of the attention function, by `trainer.packing` and `model.attn`."""
    configured, packing = config.model.attn, config.trainer.packing
    if packing == "packed" or (packing == "auto" and configured == "auto" and has_kernel(device, dtype)):
        return PACKED
    return "sdpa" if configured == "auto" else configured


def inference_dtype(configured: str, device: torch.device) -> torch.dtype:
    """The dtype of `model.dtype`; auto = bfloat16 on GPUs, float32 on CPUs."""
    if configured == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[configured]


def load_source(name: str) -> PreTrainedModel:
    """The model in host memory, float32. `name`: a local directory or a name on the hub.

    Raises BadInput for an architecture that is laid out in memory in a way that `gathered_units` cannot undo.
    """
    source = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    strange = [
        transform for transform in get_model_conversion_mapping(source, add_legacy=False) if not _undone(transform)
    ]
    if strange:
        raise BadInput(
            f"{name} is a {source.config.model_type} model, whose tensors have other names or shapes in a checkpoint "
            f"than in memory ({strange[0]}); only fused experts can be taken apart again: use a dense model, or one of "
            "the Qwen3-MoE kind"
        )
    return source


def _undone(transform: WeightTransform) -> bool:
    """Whether it only stacks the matrices of experts, and joins gate and up."""
    operations = getattr(transform, "operations", None)
    return operations is not None and all(isinstance(o, MergeModulelist | Concatenate) for o in operations)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The repeated layers. Raises BadInput for an architecture without a list of `num_hidden_layers` modules."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise BadInput(f"{type(model).__name__} has no list of {count} decoder layers: this architecture cannot be sharded")


def shard_model(
    name: str,
    source: PreTrainedModel | None,
    device: torch.device,
    how: Sharding,
    lora: LoraConfig | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """The model sharded over all ranks of the process group, frozen and with adapters if there is a `lora`, which start
    by `seed`. Collective.

    Only rank 0 gives a `source`. Everywhere the model starts without memory; then one layer after the other is made
    whole on the device, filled from rank 0, and sharded, so that no device holds more than one whole layer (the root,
    with embeddings and head, counts as one).
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(name), dtype=how.master, attn_implementation=how.attention
        )
    model.eval()  # no dropout: p must be the distribution that was sampled from
    if lora:
        add_adapters(model, lora, how.dtype, how.master)
    tensors = {} if source is None else {**dict(source.named_parameters()), **dict(source.named_buffers())}
    if lora and tensors:
        tensors = start_values(model, tensors, seed)
    names = {module: prefix for prefix, module in model.named_modules()}
    layers = list(decoder_layers(model))
    for unit in [*layers, model]:
        _fill(unit, names[unit], tensors, device)
        _shard(unit, how)
    for layer in layers:
        _wrap(layer, how)
    if source is not None:
        model.generation_config = source.generation_config
    add_token_logprobs(model)
    return model


def _wrap(layer: nn.Module, how: Sharding) -> None:
    """Compiles what a layer computes, or has it computed again in the backward pass, without keeping what it gave.
    FSDP's hooks, which gather the layer's parameters, stay outside of both."""
    if how.compiled:
        layer.forward = torch.compile(layer.forward)
    if how.kept_tokens is not None:
        layer.forward = partial(again_if_large, layer.forward, how.kept_tokens)


def again_if_large(forward: Callable[..., Any], kept_tokens: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A layer's pass over `hidden` [B, L, H]."""
    if hidden.shape[:-1].numel() <= kept_tokens:
        return forward(hidden, *args, **kwargs)
    return checkpoint(forward, hidden, *args, use_reentrant=False, **kwargs)


def _own_modules(unit: nn.Module) -> Iterator[nn.Module]:
    """`unit` and its descendants, without those that are sharded as units of their own."""
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)


def _fill(unit: nn.Module, prefix: str, tensors: dict[str, Tensor], device: torch.device) -> None:
    """Gives the unit's tensors memory on the device and the values that rank 0 has."""
    modules = list(_own_modules(unit))
    for module in modules:
        module.to_empty(device=device, recurse=False)
    if isinstance(unit, PreTrainedModel):
        unit.tie_weights()  # to_empty has given tied parameters separate memory
    own = {id(t) for m in modules for t in [*m.parameters(recurse=False), *m.buffers(recurse=False)]}
    for name, tensor in [*unit.named_parameters(prefix), *unit.named_buffers(prefix)]:
        if id(tensor) in own:
            if tensors:
                tensor.data.copy_(tensors[name])
            dist.broadcast(tensor.data, src=0)


def _shard(unit: nn.Module, how: Sharding) -> None:
    # The root's inputs are not cast: they are token ids, and temperatures, which stay what was sampled with.
    policy = MixedPrecisionPolicy(
        None if how.dtype == how.master else how.dtype,
        torch.float32,
        cast_forward_inputs=not isinstance(unit, PreTrainedModel),
    )
    sharded = fully_shard(unit, mesh=how.mesh, mp_policy=policy, offload_policy=how.offload, reshard_after_forward=True)
    if how.mesh.size() > 1:  # alone there is nothing to average, and a division by 1 would be a copy
        # Sum, do not average. Without the second line the factor 1 becomes a reduction that gloo does not have.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _fsdp(unit: nn.Module) -> FSDPModule:
    """The same object, of which `fully_shard` has changed the class."""
    return cast(FSDPModule, unit)


@contextmanager
def accumulating(model: PreTrainedModel, how: Sharding) -> Iterator[Callable[[bool], None]]:
    """For the passes whose gradients add up: before each, the function that this gives is told whether it is the last.

    Where the model stays whole, what was gathered stays from pass to pass, gradients are added up whole and summed over
    ranks in the last. Whatever happens, at the end nothing is left gathered.
    """
    root = _fsdp(model)

    def next_pass(last: bool) -> None:
        root.set_requires_gradient_sync(last or not how.whole)
        root.set_reshard_after_backward(last or not how.whole)

    root.set_reshard_after_forward(not how.whole)
    try:
        yield next_pass
    finally:
        next_pass(True)
        root.set_reshard_after_forward(True)
        for unit in [*decoder_layers(model), model]:
            _fsdp(unit).reshard()


def gathered_units(model: PreTrainedModel) -> Iterator[list[tuple[str, Tensor]]]:
    """The names and whole tensors of one unit (layer, or root) after another, in the inference dtype, on every rank's
    device: as a checkpoint has them, with experts apart. They are gone when the next is asked for. Tied tensors come
    once, under the embedding's name. Collective."""
    names = {module: f"{prefix}." if prefix else "" for prefix, module in model.named_modules()}
    layers = list(decoder_layers(model))
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    root_names = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    _fsdp(model).unshard()
    yield [(name, model.get_parameter(name).detach()) for name in root_names]
    _fsdp(model).reshard()
    for layer in layers:
        _fsdp(layer).unshard()
        tensors = {names[layer] + name: parameter.detach() for name, parameter in layer.named_parameters()}
        yield list(revert_weight_conversion(model, tensors).items())
        _fsdp(layer).reshard()
