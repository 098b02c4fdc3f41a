"""LoRA: adapters, by peft, on linear layers of a frozen base.

A layer y = W x becomes y = W x + (alpha / rank) B A x. Only A [rank, inputs] and B [outputs, rank] are trained, saved
and published. A starts at random and B at zero, so the first policy is the base. The base never changes, so it is kept
in the inference dtype. FSDP shards the base and the adapters.

With adapters off the model is its base: a reference policy that takes no memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig as PeftConfig
from peft import TaskType, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trainer.shard_sums import ShardSums
from trireme.config.trainer import LoraConfig
from trireme.core.errors import BadInput
from trireme.core.finite_json import to_json
from trireme.core.weights import Adapter, AdapterSpec

ADAPTER = "default"
"""peft's name for a model's first adapter; it is part of the parameters' names."""
PREFIX = "base_model.model."
"""Begins every tensor's name in a file of peft's."""
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BASE = "base.json"
"""The files of an adapter: peft's two, and our record of the model that it was trained on."""
OTHER_FORMULAS = ("use_dora", "use_rslora", "fan_in_fan_out", "alpha_pattern", "rank_pattern", "modules_to_save")
"""Options of peft's configuration with which an adapter is no plain LoRA: it adds another term than B A x alpha / rank
to its layers."""


def peft_config(lora: LoraConfig) -> PeftConfig:
    """Returns the settings of `trainer.lora`, which must have a rank, as peft's configuration."""
    assert lora.rank is not None
    return PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # declared as an int, used as a number
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        task_type=TaskType.CAUSAL_LM,
    )


def add_adapters(model: PreTrainedModel, lora: LoraConfig, dtype: torch.dtype, master: torch.dtype) -> None:
    """Adds LoRA layers to `model`, with adapters of dtype `master` that have no memory yet (device "meta"). Freezes all
    other parameters and casts them to `dtype`. Raises BadInput for a target layer that the model does not have."""
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    missing = [name for name in lora.target_modules if name not in linear]
    if missing:
        raise BadInput(
            f"trainer.lora.targets has {', '.join(missing)}, which {type(model).__name__} does not have as a linear "
            f"layer; it has {', '.join(sorted(linear))}"
        )
    inject_adapter_in_model(peft_config(lora), model, low_cpu_mem_usage=True)
    for parameter in model.parameters():  # not `model.to`: buffers stay as they are
        parameter.data = parameter.data.to(master if parameter.requires_grad else dtype)


def start_values(model: PreTrainedModel, source: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Returns the first values of `model`, a model with adapters, by name. Frozen tensors have the values of `source`,
    the tensors of the model without adapters; the adapters' values depend on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        values[name] = torch.zeros(tensor.shape) if tensor.requires_grad else source[name.replace(".base_layer.", ".")]
        if f".lora_A.{ADAPTER}." in name:
            nn.init.kaiming_uniform_(values[name], a=math.sqrt(5), generator=generator)
    return values


@contextmanager
def adapter_mode(model: nn.Module, *, off: bool = False, dropout: bool = False) -> Iterator[None]:
    """Context manager: sets how adapters take part in the passes in its `with` block. `off`: adapters are off, so
    `model` computes as its base; only for passes without a gradient. `dropout`: adapters drop the configured share of
    their inputs. Without these, adapters are on and drop nothing, as after the block."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]

    def switch(off: bool, dropout: bool) -> None:
        for layer in layers:
            layer._disable_adapters = off  # peft's `enable_adapters` also freezes parameters, which FSDP remembers
            layer.lora_dropout.train(dropout)

    switch(off, dropout)
    try:
        yield
    finally:
        switch(off=False, dropout=False)


@torch.no_grad()
def adapter_units(
    model: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields each whole tensor of the adapter in use, in `dtype` on `device`, with its name in peft's files. Every
    tensor comes in a list with one item, because publishing takes lists of tensors. Collective."""
    for name, parameter in _adapter_parameters(model):
        yield [(name, cast(DTensor, parameter.detach().to(device)).full_tensor().to(dtype))]


def published_adapters(model: PreTrainedModel, dtype: torch.dtype) -> list[list[tuple[str, Tensor]]]:
    """Returns the names, shapes and dtypes that `adapter_units` will yield, as tensors without memory (device
    "meta")."""
    parameters = _adapter_parameters(model)
    return [[(name, torch.empty(p.shape, dtype=dtype, device="meta"))] for name, p in parameters]


def adapter_sums(model: PreTrainedModel, dtype: torch.dtype, *, is_first: bool) -> ShardSums:
    """Returns a `ShardSums` for the tensors that `adapter_units` yields. This object computes this rank's share of the
    tensors' checksums, from which the digest is made. `dtype`: the dtype in which the tensors are published.
    `is_first`: True if this rank sums the tensors that are not sharded."""
    return ShardSums([dict(_adapter_parameters(model))], dict, dtype, is_first=is_first)


def _adapter_parameters(model: PreTrainedModel) -> Iterator[tuple[str, DTensor]]:
    """Yields the sharded parameters of the adapter in use, each with its name in peft's files."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield PREFIX + name.replace(f".{ADAPTER}.", "."), cast(DTensor, parameter)


def adapter_files(lora: LoraConfig, adapter: Adapter, base: str) -> dict[str, bytes]:
    """Returns {name: contents} of the files that accompany an adapter's tensors: peft's configuration, and a record of
    the base that it was trained on, by name (`base`) and digest."""
    spec = adapter.spec
    if spec:
        fields = {"rank": spec.rank, "alpha": spec.alpha, "targets": list(spec.targets)}
        lora = lora.model_copy(update=fields)
    config = peft_config(lora).to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    config["target_modules"] = sorted(lora.target_modules)
    files = {CONFIG: config, BASE: {"name": base, "digest": adapter.base}}
    return {name: (to_json(values, indent=2, sort_keys=True) + "\n").encode() for name, values in files.items()}


def read_adapter(
    directory: Path, spec: AdapterSpec, base: str, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """Reads an adapter in peft's form from `directory`. Returns {parameter name: tensor}, with the names and shapes of
    `shapes`.

    Raises BadInput if it cannot be read, if its rank, alpha or tensors differ from `spec` and `shapes`, if it is no
    plain LoRA, or if it records a base with another digest than `base`.
    """
    try:
        config = json.loads((directory / CONFIG).read_text())
        tensors = load_file(directory / WEIGHTS)
        if (directory / BASE).exists():
            of = json.loads((directory / BASE).read_text())
        else:
            of = {"digest": base}
    except (OSError, ValueError, SafetensorError) as error:
        raise BadInput(
            f"{directory} is no adapter that can be read ({error}); expected {CONFIG} and {WEIGHTS}"
        ) from None
    if of["digest"] != base:
        raise BadInput(
            f"the adapter {directory} was trained on another base, {of['name']}; expected the model of this run"
        )
    rank = config["r"]
    if rank != spec.rank or config["lora_alpha"] != spec.alpha:
        raise BadInput(
            f"the adapter {directory} has rank {rank} and alpha {config['lora_alpha']:g}; expected {spec.rank} and "
            f"{spec.alpha:g}"
        )
    unsupported = [name for name in OTHER_FORMULAS if config.get(name)]
    if unsupported:
        raise BadInput(
            f"the adapter {directory} has {', '.join(unsupported)}; expected plain LoRA: start from an adapter that "
            "was trained without such options"
        )
    names = {PREFIX + name.replace(f".{ADAPTER}.", "."): name for name in shapes}
    renamed = {names.get(name, name): tensor for name, tensor in tensors.items()}
    wrong = [
        name for name in {**shapes, **renamed} if name not in renamed or shapes.get(name) != tuple(renamed[name].shape)
    ]
    if wrong:
        raise BadInput(
            f"the adapter {directory} has other tensors than an adapter of rank {spec.rank} for "
            f"{', '.join(spec.targets)} of this model; the first that differs: {sorted(wrong)[0]}"
        )
    return renamed
