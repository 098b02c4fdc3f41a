"""Sums of a part of a tensor."""

from collections.abc import Sequence

import torch

from trireme.transports.tensor_sums import TensorPart, c_strides, part_sums


def part_tensor_sums(
    part: torch.Tensor, first: int = 0, strides: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns the sums of a part, int64 [2]. `first`, `strides`: place and strides in the whole tensor, in elements
    (None: it is contiguous there). `dtype`: in which it is summed (None: its own)."""
    steps = c_strides(part.shape) if strides is None else strides
    return part_sums([TensorPart(part.detach(), first, steps, dtype or part.dtype)])[0]
