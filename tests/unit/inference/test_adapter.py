"""Adapters beside the policy's, given to vLLM's own cache of them; end-to-end tests look at the kernels."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference.adapter import POLICY, add_adapter, drop_adapter, request_of
from trireme.core.errors import WeightsRefused
from trireme.core.weights import Adapter

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


class Manager:
    lora_config = SimpleNamespace(lora_dtype=torch.float32)

    def __init__(self) -> None:
        self.adapters: dict[int, Any] = {}

    def add_adapter(self, lora: Any) -> None:
        self.adapters[lora.id] = lora

    def remove_adapter(self, number: int) -> None:
        del self.adapters[number]


def tensors(layer: str = LAYER) -> dict[str, torch.Tensor]:
    return {f"{layer}.lora_A.weight": torch.ones(4, 6), f"{layer}.lora_B.weight": torch.ones(8, 4)}


def test_an_adapter_is_scaled_and_a_copy_under_its_own_number() -> None:
    """What arrived is in memory that is mapped, and given back. One of the output matrix is refused."""
    manager = Manager()
    runner: Any = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    arrived = tensors()
    add_adapter(runner, 2, arrived, Adapter("d", 4, 8.0))
    for tensor in arrived.values():
        tensor.zero_()
    (lora,) = manager.adapters[2].loras.values()
    assert (lora.rank, lora.scaling) == (4, 1.0)
    assert lora.lora_a.unique().tolist() == [1.0]
    assert lora.lora_b.unique().tolist() == [2.0]
    assert request_of("a", 2).lora_int_id != POLICY.lora_int_id
    drop_adapter(runner, 2)
    with pytest.raises(WeightsRefused, match=r"tensors of lm_head.*one lm_head for all requests"):
        add_adapter(runner, 2, tensors("base_model.model.lm_head"), Adapter("d", 4, 8.0))
    assert manager.adapters == {}
