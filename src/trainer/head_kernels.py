"""Two kernels in Triton for the logits of a chunk of tokens: log-probabilities of targets, and the gradient.

Each kernel reads a logit once, and the second writes its gradient. The same in tensor operations (`trainer.logprobs`)
reads or writes each logit about twenty times. Each target names its row, so a row may have several targets, or none.
With z = logits / temperature, l = log sum exp(z) and s = exp(z - l) of a row:

    logprobs_m           z[target_m] - l
    gradient by z_v      sum_m g_m [target_m = v] - (sum_m g_m) s_v

where g is the gradient of the loss by the log-probabilities. Sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096
"""Logits of a row that a program holds at once."""
WARPS = 8
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def forward_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    targets: tl.tensor,
    bounds: tl.tensor,
    normalizers: tl.tensor,
    logprobs: tl.tensor,
    vocabulary: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Writes a row's log-sum-exp and the log-probabilities of its targets. `bounds` int64 [rows + 1]: row t has the
    targets from `bounds[t]` up to, not including, `bounds[t + 1]`."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocabulary
    scale = 1.0
    if temperatures is not None:
        scale /= tl.load(temperatures + row)
    largest = tl.full([], _LOWEST, tl.float32)  # finite: from -inf, a row that begins with -inf would become NaN
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocabulary, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        z = tl.load(logits + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32) * scale
        before = largest
        largest = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(before - largest) + tl.exp(z - largest)
    normalizer = largest + tl.log(tl.sum(total, 0))
    tl.store(normalizers + row, normalizer)
    for m in range(tl.load(bounds + row), tl.load(bounds + row + 1)):
        z = tl.load(logits + tl.load(targets + m)).to(tl.float32) * scale
        tl.store(logprobs + m, z - normalizer)


@triton.jit
def backward_kernel(
    logits: tl.tensor,
    gradient: tl.tensor,
    temperatures: tl.tensor,
    targets: tl.tensor,
    bounds: tl.tensor,
    normalizers: tl.tensor,
    logprob_gradients: tl.tensor,
    vocabulary: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Writes the gradient of COLUMNS logits of a row. `gradient` may have the memory of `logits`, because each thread
    writes only what it read. `bounds`: as in `forward_kernel`."""
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = row.to(tl.int64) * vocabulary + column
    scale = 1.0
    if temperatures is not None:
        scale /= tl.load(temperatures + row)
    z = tl.load(logits + place, mask=column < vocabulary, other=float("-inf")).to(tl.float32) * scale
    share = tl.exp(z - tl.load(normalizers + row))
    by_z = tl.zeros([COLUMNS], tl.float32)
    total = 0.0
    for m in range(tl.load(bounds + row), tl.load(bounds + row + 1)):
        upstream = tl.load(logprob_gradients + m)
        total += upstream
        by_z += tl.where(column == tl.load(targets + m), upstream, 0.0)
    by_z -= total * share
    tl.store(gradient + place, (by_z * scale).to(gradient.dtype.element_ty), mask=column < vocabulary)


def head_forward(logits: Tensor, temperatures: Tensor | None, targets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-sum-exp of each row of `logits` [T, V], and the log-probability of each target: float32 [T], [M].

    `temperatures` float32 [T]; None: all 1. `targets` int64 [M], `rows` int64 [M]: the row of each target, ascending.
    """
    normalizers = logits.new_empty(len(logits), dtype=torch.float32)
    logprobs = logits.new_empty(len(targets), dtype=torch.float32)
    forward_kernel[(len(logits),)](
        *(logits, temperatures, targets, _bounds(rows, len(logits)), normalizers, logprobs),
        logits.shape[1],
        COLUMNS,
        num_warps=WARPS,
    )
    return normalizers, logprobs


def head_backward(
    logits: Tensor,
    temperatures: Tensor | None,
    targets: Tensor,
    rows: Tensor,
    normalizers: Tensor,
    logprob_gradients: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the gradient of `logits` [T, V] in `dtype`; in the memory of `logits` if they have this dtype.
    `logprob_gradients` float32 [M]: the gradient of the log-probabilities. All other arguments: as for `head_forward`,
    or its results."""
    gradient = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    backward_kernel[(len(logits), triton.cdiv(logits.shape[1], COLUMNS))](
        *(logits, gradient, temperatures, targets, _bounds(rows, len(logits)), normalizers),
        logprob_gradients.contiguous(),  # of a sum all are one element in memory
        logits.shape[1],
        COLUMNS,
        num_warps=WARPS,
    )
    return gradient


def _bounds(rows: Tensor, count: int) -> Tensor:
    """Returns int64 [count + 1]: the targets before each row, and all targets. `rows`: the row of each target."""
    return torch.searchsorted(rows, torch.arange(count + 1, device=rows.device))
