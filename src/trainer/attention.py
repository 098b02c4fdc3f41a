"""Attention over packed rows: several sequences one after the other, none of which sees another.

Registered with transformers under the name `PACKED`, so that every model whose attention comes from its registry can
be packed. A model is told where sequences start by two arguments of its forward pass, under the names that transformers
has for them: `cu_seq_lens_q` int32 [sequences + 1], and `max_length_q`, the longest. Without them each row is one
sequence. Models make no mask for an attention of this name.

On GPUs, in 16 bits, PyTorch's variable-length kernel computes only what is there. Everywhere else a mask over all pairs
of tokens does the same: right, but the work grows with the square of the row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trireme.core.errors import BadInput

PACKED = "packed"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the variable-length kernel computes on this device in this dtype."""
    return device.type == "cuda" and dtype in KERNEL_DTYPES


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: [B, L, heads, dim], from `query` [B, heads, L, dim] and `key`, `value`
    [B, key heads, L, dim]. Raises BadInput for what the kernel has not: sinks, soft caps."""
    unknown = [name for name in ("s_aux", "softcap", "position_bias") if others.get(name) is not None]
    if unknown or attention_mask is not None or dropout:
        what = ", ".join(unknown) or ("a mask" if attention_mask is not None else "dropout")
        raise BadInput(f"{type(module).__name__} uses {what}, which packed rows cannot: set --trainer.packing rows")
    batch, _, length, _ = query.shape
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        max_length_q = length
    kernel = varlen_attn if has_kernel(query.device, query.dtype) else masked_attention
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))  # [B L, heads, dim]
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    grouped = query.shape[1] != key.shape[1]
    starts, longest = cu_seq_lens_q, max_length_q
    out = kernel(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=window, enable_gqa=grouped)
    assert isinstance(out, Tensor), "nothing else was asked for"
    return out.view(batch, length, *out.shape[1:]), None


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    _key_starts: Tensor,
    _longest: int,
    _longest_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What `varlen_attn` computes, for the calls above: [T, heads, dim], by a mask of [T, T]."""
    place = torch.arange(len(query), device=query.device)
    sequence = torch.searchsorted(starts[1:].to(place.dtype), place, right=True)
    back = place[:, None] - place
    mask = (sequence[:, None] == sequence) & (back >= 0)
    if window_size[0] >= 0:
        mask &= back <= window_size[0]
    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))  # [1, heads, T, dim]
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out[0].transpose(0, 1)


AttentionInterface.register(PACKED, packed_attention)
