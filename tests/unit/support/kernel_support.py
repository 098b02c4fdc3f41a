"""Stands in on CPUs for the kernel that PyTorch's `varlen_attn` runs on GPUs. All between the caller and the kernel is
PyTorch's own, with the schemas of the CUDA build.

It computes in float64. Masks are aligned at the bottom right, as in PyTorch's
`aten/src/ATen/native/transformers/cuda/flash_attn/mask.h`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from trainer import shared_attention


@contextmanager
def kernel_on_cpus() -> Iterator[None]:
    """Within the block, attention over shared prefixes runs on CPUs what it runs on GPUs."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", forward)
    library.impl("_flash_attention_backward", backward)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_attention, "_on_gpu", lambda query: True)
        try:
            yield
        finally:
            library._destroy()


def forward(
    query, key, value, starts_q, starts_k, longest_q, longest_k, dropout, is_causal, debugs, *,
    scale=None, window_size_left, window_size_right, **absent,
):  # fmt: skip
    """Returns outputs [tokens, heads, dim], and the logarithms of the softmax's denominators [heads, tokens]."""
    assert set(absent.values()) <= {None}
    out = torch.full_like(query, math.nan)
    normalizers = query.new_full((query.shape[1], len(query)), math.nan, dtype=torch.float32)
    bounds = starts_q, starts_k, longest_q, longest_k
    window = _window(is_causal, window_size_left, window_size_right)
    for queries, _, _, _, v, scores in _sequences(query, key, value, bounds, window, scale):
        out[queries] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
        normalizers[:, queries] = scores.logsumexp(-1).float()
    return out, normalizers, torch.zeros(2, dtype=torch.uint64), query.new_empty(0), query.new_empty(0)


def backward(
    grad, query, key, value, out, normalizers, starts_q, starts_k, longest_q, longest_k, dropout, is_causal, state,
    unused, *, scale=None, window_size_left, window_size_right,
):  # fmt: skip
    """Returns the gradients by query, key and value."""
    assert (state.dtype, state.tolist()) == (torch.uint64, [0, 0])
    assert normalizers.shape == (query.shape[1], len(query))
    grads = [torch.full_like(states, math.nan) for states in (query, key, value)]
    bounds = starts_q, starts_k, longest_q, longest_k
    window = _window(is_causal, window_size_left, window_size_right)
    for queries, keys, q, k, v, scores in _sequences(query, key, value, bounds, window, scale):
        upstream, result = (states[queries].double().transpose(0, 1) for states in (grad, out))
        weights = (scores - normalizers[:, queries, None]).exp()
        by_scores = weights * (upstream @ v.mT - (upstream * result).sum(-1, keepdim=True)) * _factor(scale, query)
        grads[0][queries] = (by_scores @ k).transpose(0, 1).to(query.dtype)
        for into, by_head in ((grads[1], by_scores.mT @ q), (grads[2], weights.mT @ upstream)):
            into[keys] = by_head.unflatten(0, (key.shape[1], -1)).sum(1).transpose(0, 1).to(key.dtype)
    return tuple(grads)


def _sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: tuple[Tensor, Tensor, int, int],
    window: tuple[int, int],
    scale: float | None,
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor, Tensor]]:
    """Yields for each sequence the places of its queries and keys, its states [heads, tokens, dim] in float64, and its
    scores [heads, queries, keys]."""
    starts_q, starts_k, longest_q, longest_k = bounds
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert (longest_q, longest_k) == (int(starts_q.diff().max()), int(starts_k.diff().max()))
    assert (starts_q[-1], starts_k[-1]) == (len(query), len(key)) == (len(query), len(value))
    left, right = window
    for d in range(len(starts_q) - 1):
        queries, keys = (slice(int(starts[d]), int(starts[d + 1])) for starts in (starts_q, starts_k))
        q, k, v = (
            states[places].double().repeat_interleave(query.shape[1] // states.shape[1], 1).transpose(0, 1)
            for states, places in ((query, queries), (key, keys), (value, keys))
        )
        column = torch.arange(k.shape[1])
        row = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        hidden = (column < row - left) if left >= 0 else torch.zeros_like(row + column, dtype=torch.bool)
        if right >= 0:
            hidden |= column > row + right
        scores = (q @ k.mT * _factor(scale, query)).masked_fill(hidden, -math.inf)
        yield queries, keys, q, k, v, scores


def _window(is_causal: bool, left: int, right: int) -> tuple[int, int]:
    """Returns how many tokens before and after its own a query sees; -1: all."""
    return (left, 0) if is_causal else (left, right)


def _factor(scale: float | None, query: Tensor) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale
