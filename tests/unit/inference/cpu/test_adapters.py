"""Products with adapters are those of vLLM's own functions, and do not depend on the other tokens of a batch."""

import inspect

import pytest
import torch
from vllm.lora.ops.torch_ops import lora_ops

from inference.cpu import adapters

OURS = {"bgmv_shrink": adapters.shrink, "bgmv_expand": adapters.expand, "bgmv_expand_slice": adapters.expand_slice}
ARGUMENTS = {"bgmv_shrink": (0.5,), "bgmv_expand": (), "bgmv_expand_slice": (3, 8)}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_vllm(name: str, stacked: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = torch.randn(4, 1, 8, 32) if stacked else torch.randn(4, 8, 32)
    inputs, outputs = torch.randn(21, 32).to(dtype), torch.randn(21, 12)
    indices = torch.tensor([0, 2, -1] * 7)
    results = []
    for function in (getattr(lora_ops, name), OURS[name]):
        results.append(outputs.clone())
        function(inputs, weights, results[-1], indices, *ARGUMENTS[name])
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
    assert not torch.equal(results[1], outputs)


@pytest.mark.parametrize("width", [576, 1536])
def test_a_token_has_the_same_bits_in_every_batch(width: int) -> None:
    torch.manual_seed(0)
    inputs, weights = torch.randn(70, width), torch.randn(1, 16, width)
    indices = torch.zeros(70, dtype=torch.int64)
    whole = adapters.adapter_products(inputs, weights, indices, torch.float32)
    for rows in range(1, 70):
        part = adapters.adapter_products(inputs[:rows], weights, indices[:rows], torch.float32)
        assert torch.equal(part, whole[:rows]), rows


def test_the_functions_of_vllm_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.lora.punica_wrapper import punica_cpu

    for module in (lora_ops, punica_cpu):
        for name in OURS:
            monkeypatch.setattr(module, name, getattr(module, name))  # undone at the end
    theirs = [inspect.signature(getattr(lora_ops, name)).parameters.values() for name in OURS]
    adapters.multiply_by_adapter()
    assert all(getattr(module, name) is ours for module in (lora_ops, punica_cpu) for name, ours in OURS.items())
    taken = [inspect.signature(ours).parameters.values() for ours in OURS.values()]
    assert [[(p.name, p.default) for p in one] for one in taken] == [
        [(p.name, p.default) for p in one] for one in theirs
    ]
