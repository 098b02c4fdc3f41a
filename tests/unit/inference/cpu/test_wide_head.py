"""Logits of an engine on CPUs, in float32 of a model in bfloat16: vLLM's own, without a copy of the output matrix."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from inference.cpu.wide_head import computes_from_packed, multiply_in_parts
from trireme.core import wide_product

VOCABULARY, HIDDEN = 37, 16


class Model(nn.Module):
    """An output matrix in bfloat16, and vLLM's object that computes logits from it in `head_dtype`."""

    def __init__(self, head_dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.bfloat16)
        self.head.requires_grad_(False)
        self.head.quant_method = UnquantizedEmbeddingMethod()  # type: ignore[assignment]
        with set_current_vllm_config(VllmConfig()):
            self.processor = LogitsProcessor(VOCABULARY)
        self.processor.head_dtype = head_dtype

    def logits(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        head: Any = self.head
        return self.processor._apply_head(head, hidden, bias)


@pytest.mark.parametrize("shape", [(1, HIDDEN), (5, HIDDEN), (2, 3, HIDDEN), (0, HIDDEN)])
@pytest.mark.parametrize("biased", [False, True])
def test_logits_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], biased: bool) -> None:
    monkeypatch.setattr(wide_product, "CAST_ELEMENTS", 5 * HIDDEN)  # the last part has two rows
    model, hidden = Model(torch.float32), torch.randn(shape).to(torch.bfloat16)
    bias = torch.randn(VOCABULARY).to(torch.bfloat16) if biased else None
    expected = model.logits(hidden, bias)
    casts: list[int] = []
    plain = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args: (casts.append(self.numel()), plain(self, *args))[1])
    multiply_in_parts(model)
    found = model.logits(hidden, bias)
    assert (found.dtype, found.shape) == (torch.float32, expected.shape)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert max(casts) <= max(5 * HIDDEN, hidden.numel()), "never the whole matrix"


def test_other_dtypes_and_layers_go_vllms_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, hidden = Model(torch.bfloat16), torch.randn(3, HIDDEN).to(torch.bfloat16)
    multiply_in_parts(model)
    seen = []
    monkeypatch.setattr(LogitsProcessor, "_apply_head", lambda self, *given: seen.append((self, *given)))
    model.logits(hidden, None)
    model.processor.head_dtype, model.head.quant_method = torch.float32, SimpleNamespace()  # type: ignore[assignment]
    model.logits(hidden, None)
    assert seen == [(model.processor, model.head, hidden, None)] * 2


def test_the_packed_matrix_is_used_for_logits_in_the_models_dtype() -> None:
    assert computes_from_packed(Model(torch.bfloat16))
    assert not computes_from_packed(Model(torch.float32))
    assert computes_from_packed(nn.Linear(2, 2)), "an unknown module may compute with its output matrix"
