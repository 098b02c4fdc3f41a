"""Lets an engine on CPUs compute logits in another dtype than the model's without a copy of the output matrix.

vLLM casts the whole matrix in each step: for a vocabulary of 32,000 and 768 hidden values 98 MB of new memory, which
takes longer than the rest of a step of a model of 100 million parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from trireme.core.wide_product import wide_product

APPLY = "_apply_head"
Apply: TypeAlias = Callable[[VocabParallelEmbedding, Tensor, Tensor | None], Tensor]


def multiply_in_parts(model: nn.Module) -> None:
    """Replaces vLLM's product of hidden states and output matrix in the objects of a model that compute it."""
    for module in model.modules():
        if isinstance(module, LogitsProcessor) and APPLY not in vars(module):
            setattr(module, APPLY, _in_parts(module))


def computes_from_packed(model: nn.Module) -> bool:
    """Returns True if vLLM computes logits of a model from an output matrix that is packed for the model's dtype, and
    not from the plain one."""
    dtype = next(model.parameters()).dtype
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    return not processors or any(each.head_dtype in (None, dtype) for each in processors)


def _in_parts(processor: LogitsProcessor) -> Apply:
    """Returns what stands in for `LogitsProcessor._apply_head` of one object."""

    def apply(head: VocabParallelEmbedding, hidden: Tensor, bias: Tensor | None) -> Tensor:
        plain = isinstance(head.quant_method, UnquantizedEmbeddingMethod)
        if not plain or processor.head_dtype in (None, hidden.dtype) or hidden.device.type != "cpu":
            applied: Tensor = LogitsProcessor._apply_head(processor, head, hidden, bias)
            return applied
        weight = head.get_parameter("weight")
        rows = wide_product(hidden.flatten(0, -2), weight, processor.head_dtype)
        logits = rows.view(*hidden.shape[:-1], len(weight))
        return logits if bias is None else logits + bias.to(processor.head_dtype)

    return apply
