"""Multiplies all tokens of an adapter at once by its matrices."""

from __future__ import annotations

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

UNIT = 16
"""Tokens are multiplied in multiples of this number. The kernels for fewer rows round in another way, and a token's
result must not depend on the other tokens of its batch."""


def adapter_products(
    inputs: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns each token's product with the matrix of its adapter, computed in `dtype`: [B, out]. `inputs`: [B, in].
    `weights`: [adapters, out, in] or [adapters, 1, out, in]. `indices`: the adapter of each token, int64 [B]; negative
    indices count from the end, as in vLLM's own function."""
    inputs = inputs.to(dtype)
    weights = weights.reshape(-1, *weights.shape[-2:]).to(dtype)
    products = inputs.new_empty(len(inputs), weights.shape[1])
    for index in indices.unique().tolist():
        rows = (indices == index).nonzero().squeeze(1)
        padding = -len(rows) % UNIT
        tokens = torch.constant_pad_nd(inputs[rows], (0, 0, 0, padding))
        products[rows] = (tokens @ weights[index].T)[: len(rows)]
    return products


def multiply_by_adapter() -> None:
    """Patches vLLM so that an engine in this process, or forked from it, multiplies all tokens of an adapter by its
    matrix in one product. vLLM copies the adapter's matrices for each token, and computes a product for each token.

    Gain: 64 tokens are multiplied by a matrix of 16 x 576 in 0.02 ms instead of 2.2 ms (docs/internals/benchmarks.md,
    laptop).
    """
    for module in (lora_ops, punica_cpu):
        vars(module).update(bgmv_shrink=shrink, bgmv_expand=expand, bgmv_expand_slice=expand_slice)


def shrink(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """Writes each token's product with its adapter's matrix, times `scaling`, to the first columns of `output_tensor`,
    as `bgmv_shrink` of vLLM does."""
    products = adapter_products(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype)
    output_tensor[:, : products.shape[1]] = scaling * products


def expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """Adds each token's product with its adapter's matrix to the first columns of `output_tensor`. Without
    `add_inputs`, overwrites these columns instead. Replaces `bgmv_expand` of vLLM. If the product and `output_tensor`
    differ in width, uses only the columns that both have: adapter and model may pad a vocabulary differently."""
    width = min(lora_b_weights.shape[-2], output_tensor.shape[1])
    weights = lora_b_weights[..., :width, :]
    expand_slice(inputs, weights, output_tensor, lora_indices_tensor, 0, width, add_inputs)


def expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Adds each token's product with its adapter's matrix to the `slice_size` columns of `output_tensor` from column
    `slice_offset` on. Without `add_inputs`, overwrites these columns instead. Replaces `bgmv_expand_slice` of vLLM."""
    products = adapter_products(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype)
    target = output_tensor[:, slice_offset : slice_offset + slice_size]
    if add_inputs:
        target += products
    else:
        target.copy_(products)
