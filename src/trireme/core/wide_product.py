"""The product of hidden states and an output matrix in a wider dtype than theirs: logits in float32 of a model in 16
bits, in the trainer and in engines on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

CAST_ELEMENTS = 2**19
"""Elements of the matrix that a CPU casts at a time: 2 MiB of float32, which stay in its cache. A copy of all is made
in new memory each time, which the system gives page by page."""


def wide_product(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns hidden [T, H] weight^T [H, V] in `dtype`, without a copy of the whole matrix in it."""
    try:
        return torch.mm(hidden, weight.T, out_dtype=dtype)
    except NotImplementedError:  # reason: torch's own error on CPUs; torch 2.13 has this product for CUDA alone
        product, wide = hidden.new_empty(len(hidden), len(weight), dtype=dtype), hidden.to(dtype)
        for start in range(0, len(weight), at_once := max(1, CAST_ELEMENTS // weight.shape[1])):
            rows = slice(start, start + at_once)
            torch.mm(wide, weight[rows].to(dtype).T, out=product[:, rows])
        return product
