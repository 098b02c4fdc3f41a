"""LoRA: adapters, by peft, on linear layers of a frozen base.

A layer y = W x becomes y = W x + (alpha / rank) B A x, of which only A [rank, inputs] and B [outputs, rank] are
trained, saved and published. A starts at random and B at zero, so that the first policy is the base. The base is kept
in the inference dtype: nothing is ever added to it. FSDP shards it and the adapters alike.

With adapters off the model is its base: a reference policy that takes no memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig as PeftConfig
from peft import TaskType, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.export import safetensors_header
from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.config.lora import lora_targets
from trireme.config.schema import LoraConfig
from trireme.core.errors import BadInput
from trireme.core.weights import Adapter, TensorEntry

ONLY = "default"
"""peft's name for a model's first adapter, which is part of its parameters' names."""
PREFIX = "base_model.model."
"""Before every name in a file of peft's."""
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
BASE = "base.json"


def peft_config(lora: LoraConfig) -> PeftConfig:
    assert lora.rank is not None, "asked for only where there are adapters"
    return PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # declared as an int, used as a number
        lora_dropout=lora.dropout,
        target_modules=list(lora_targets(lora)),
        task_type=TaskType.CAUSAL_LM,
    )


def add_adapters(model: PreTrainedModel, lora: LoraConfig, dtype: torch.dtype, master: torch.dtype) -> None:
    """Puts adapters of dtype `master` into a model, without memory; freezes all else, which becomes `dtype`.

    Raises BadInput for a target that the model does not have.
    """
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    missing = [name for name in lora_targets(lora) if name not in linear]
    if missing:
        raise BadInput(
            f"trainer.lora.targets has {', '.join(missing)}, which {type(model).__name__} has not as a linear layer; "
            f"it has {', '.join(sorted(linear))}"
        )
    inject_adapter_in_model(peft_config(lora), model, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        trained = is_adapter(name)
        parameter.requires_grad_(trained)
        parameter.data = parameter.data.to(master if trained else dtype)  # not `model.to`: buffers stay as they are


def is_adapter(name: str) -> bool:
    """Whether this is the name of a parameter of an adapter."""
    return name.endswith((f".lora_A.{ONLY}.weight", f".lora_B.{ONLY}.weight"))


def start_values(model: PreTrainedModel, source: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """By name in `model`, which has adapters: the tensors of `source`, which has none, and the adapters' first values,
    which depend on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_adapter(name):
            values[name] = torch.zeros(tensor.shape)
            if f".lora_A.{ONLY}." in name:
                nn.init.kaiming_uniform_(values[name], a=math.sqrt(5), generator=generator)
        else:
            values[name] = source[name.replace(".base_layer.", ".")]
    return values


def lora_layers(model: nn.Module) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within, `model` computes what its base does. Only for passes without a gradient."""
    layers = lora_layers(model)
    for layer in layers:
        layer._disable_adapters = True  # peft's `enable_adapters` also freezes parameters, which FSDP remembers
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def exchanged(parameters: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[None]:
    """Within, each tensor of `parameters` has the values of its counterpart in `others`, and that has its."""
    _exchange(parameters, others)
    try:
        yield
    finally:
        _exchange(parameters, others)


@torch.no_grad()
def _exchange(parameters: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for parameter, other in zip(parameters, others, strict=True):
        before = parameter.clone()
        parameter.copy_(other)
        other.copy_(before)


@contextmanager
def dropping(model: nn.Module) -> Iterator[None]:
    """Within, adapters drop a share of their inputs, if they are to."""
    dropouts = [layer.lora_dropout for layer in lora_layers(model)]
    for dropout in dropouts:
        dropout.train()
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.eval()


@torch.no_grad()
def adapter_units(
    model: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> Iterator[list[tuple[str, Tensor]]]:
    """The adapters' tensors, whole, in `dtype`, under the names that peft gives them in files. Collective."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            whole = parameter.detach().to(device).full_tensor()
            yield [(PREFIX + name.replace(f".{ONLY}.", "."), whole.to(dtype))]


def adapter_files(lora: LoraConfig, adapter: Adapter, base: str) -> dict[str, bytes]:
    """What belongs beside the tensors, by file name: peft's configuration, and which base they were trained on."""
    config = {
        **peft_config(lora).to_dict(),
        "base_model_name_or_path": base,
        "inference_mode": True,
        "target_modules": sorted(lora_targets(lora)),
    }
    return {CONFIG: _json(config), BASE: _json({"name": base, "digest": adapter.base})}


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def write_adapter(
    path: Path,
    entries: Sequence[TensorEntry],
    buckets: Sequence[npt.NDArray[np.uint8]],
    companions: Mapping[str, bytes],
) -> list[FileRecord]:
    """Writes published adapters as a directory that peft and `vllm serve --lora-modules` open. Raises StorageFailed."""
    records = [write_bytes(path, name, contents) for name, contents in companions.items()]
    tensors = (buckets[e.bucket][e.offset : e.offset + e.nbytes].data for e in entries)
    return [*records, write_bytes(path, WEIGHTS, safetensors_header(entries), *tensors)]
