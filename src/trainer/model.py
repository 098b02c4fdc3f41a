"""The policy as the trainer holds it: a Hugging Face causal language model, sharded by FSDP2 layer by layer.

Master weights are float32. With another inference dtype FSDP casts parameters when it gathers a layer, so that the
trainer computes with the very values that replicas get; gradients are reduced in float32, and *summed* over ranks,
because losses are raw sums over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from trainer.logprobs import add_token_logprobs
from trireme.errors import BadInput


def inference_dtype(configured: str, device: torch.device) -> torch.dtype:
    """The dtype of `model.dtype`; auto = bfloat16 on GPUs, float32 on CPUs."""
    if configured == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[configured]


def load_source(name: str, attn: str) -> PreTrainedModel:
    """The model in host memory, float32. `name`: a local directory or a name on the hub.

    Raises BadInput for an architecture that is laid out differently in memory than in its checkpoint.
    """
    source = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation=_attention(attn))
    if get_model_conversion_mapping(source, add_legacy=False):
        raise BadInput(
            f"{name} is a {source.config.model_type} model, whose tensors have other names or shapes in a checkpoint "
            "than in memory (fused experts, say); such models cannot be published yet: use a dense one, like Qwen3"
        )
    return source


def _attention(configured: str) -> str:
    return "sdpa" if configured == "auto" else configured


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The repeated layers. Raises BadInput for an architecture without a list of `num_hidden_layers` modules."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise BadInput(f"{type(model).__name__} has no list of {count} decoder layers: this architecture cannot be sharded")


def attention_length(model: PreTrainedModel) -> int:
    """The length at which causal attention costs as much as all else, in multiplications per token: with n tokens of
    context on average n / 2 keys and as many values are multiplied in each layer, against every parameter once."""
    config = model.config.get_text_config()
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    return max(1, model.num_parameters() // (config.num_hidden_layers * width))


def shard_model(
    name: str, attn: str, source: PreTrainedModel | None, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """The model sharded over all ranks of the process group. Collective.

    Only rank 0 gives a `source`. Everywhere the model starts without memory; then one layer after the other is made
    whole on the device, filled from rank 0, and sharded, so that no device holds more than one whole layer (the root,
    with embeddings and head, counts as one).
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(name), dtype=torch.float32, attn_implementation=_attention(attn)
        )
    model.eval()  # no dropout: p must be the distribution that was sampled from
    tensors = {} if source is None else {**dict(source.named_parameters()), **dict(source.named_buffers())}
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(None if dtype == torch.float32 else dtype, torch.float32)
    names = {module: prefix for prefix, module in model.named_modules()}
    for unit in [*decoder_layers(model), model]:
        _fill(unit, names[unit], tensors, device)
        _shard(unit, mesh, policy)
    if source is not None:
        model.generation_config = source.generation_config
    add_token_logprobs(model)
    return model


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


def _shard(unit: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    sharded = fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # Sum, do not average. Without the second line the factor 1 becomes a reduction that gloo does not have.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def _fsdp(unit: nn.Module) -> FSDPModule:
    """The same object, of which `fully_shard` has changed the class."""
    return cast(FSDPModule, unit)


def gathered_units(model: PreTrainedModel) -> Iterator[list[tuple[str, Tensor]]]:
    """The names and whole tensors of one unit (layer, or root) after another, in the inference dtype, on every rank's
    device. They are gone when the next is asked for. Tied tensors come once, under the embedding's name. Collective."""
    names = {module: f"{prefix}." if prefix else "" for prefix, module in model.named_modules()}
    layers = list(decoder_layers(model))
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    root_names = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    _fsdp(model).unshard()
    yield [(name, model.get_parameter(name).detach()) for name in root_names]
    _fsdp(model).reshard()
    for layer in layers:
        _fsdp(layer).unshard()
        yield [(names[layer] + name, parameter.detach()) for name, parameter in layer.named_parameters()]
        _fsdp(layer).reshard()
