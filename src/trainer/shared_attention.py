"""Attention over a row in which each common prefix stands once (`trainer.shared_rows`). A datum's own tokens, which
follow the prefix that it shares with the datum before it, see all tokens of the datum.

Queries are a datum's own tokens. Keys and values are gathered from the row, one for each token of the datum, so each
datum has as many keys as without shared prefixes. The mask is causal, aligned at the bottom right: the last query sees
every key.

It is one operator for autograd and the compiler. The gathered keys are not kept: the backward pass gathers them again,
and adds their gradients in a fixed order, in float32. On GPUs it runs PyTorch's variable-length kernel once, with
different bounds for queries and keys. On CPUs it runs the kernel behind `scaled_dot_product_attention`, once for all
datums of the same sizes, with a mask for one datum of these sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("trireme::shared_attention", mutates_args=())
def shared_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    path: Tensor,
    own_starts: Tensor,
    starts: Tensor,
    longest_own: int,
    longest: int,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Returns the attention of a row of Q tokens in which each common prefix stands once, [Q, heads, dim]; and the
    logarithms of the softmax's denominators, which only the backward pass reads.

    `query` [Q, heads, dim], `key` and `value` [Q, key heads, dim]. `path`, `own_starts`, `starts`, `longest_own` and
    `longest`: as in `trainer.shared_rows.SharedRow`. `window`: how many tokens a token sees at most, itself included;
    None: all.
    """
    if _on_gpu(query):
        lengths = own_starts, starts, longest_own, longest
        options: dict[str, Any] = {"scale": scale, "window_size": _bounds(window), "enable_gqa": True}
        outputs = varlen_attn(query, key[path], value[path], *lengths, return_aux=AuxRequest(lse=True), **options)
        return outputs[0], outputs[1]
    out = torch.empty_like(query)
    normalizers = query.new_empty(query.shape[:2], dtype=torch.float32)
    for queries, keys, mask in _groups(query, path, own_starts, starts, window):
        states = (_by_head(query[queries]), _by_head(key[keys]), _by_head(value[keys]))
        group_out, group_normalizers = flash_on_cpu(*states, 0.0, False, attn_mask=mask, scale=scale)
        out[queries] = _by_head(group_out)
        normalizers[queries] = group_normalizers.transpose(1, 2)
    return out, normalizers


@torch.library.custom_op("trireme::shared_attention_backward", mutates_args=())
def shared_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normalizers: Tensor,
    path: Tensor,
    own_starts: Tensor,
    starts: Tensor,
    longest_own: int,
    longest: int,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients with respect to query, key and value. `grad`: the gradient with respect to the output;
    `out` and `normalizers`: the outputs of `shared_attention`."""
    # A key's gradient is a sum over all datums with this key: in 16 bits each of their terms would round it.
    grad_key = torch.zeros_like(key, dtype=torch.float32)
    grad_value = torch.zeros_like(value, dtype=torch.float32)
    if _on_gpu(query):
        bounds = _bounds(window)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        lengths = own_starts, starts, longest_own, longest
        options = (bounds == (-1, 0), no_dropout, scale, list(bounds))
        grad_query, *grads = torch.ops.torch_attn._varlen_attn_backward(
            grad, query, key[path], value[path], out, normalizers, *lengths, *options
        )
        # With repeated places this sorts them first, so that sums have one order; index_add_ has not.
        grad_key.index_put_((path,), grads[0].float(), accumulate=True)
        grad_value.index_put_((path,), grads[1].float(), accumulate=True)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)
    grad_query = torch.zeros_like(query)
    for queries, keys, mask in _groups(query, path, own_starts, starts, window):
        states = (_by_head(query[queries]), _by_head(key[keys]), _by_head(value[keys]))
        saved = _by_head(out[queries]), normalizers[queries].transpose(1, 2).contiguous()
        grads = flash_on_cpu_backward(_by_head(grad[queries]), *states, *saved, 0.0, False, attn_mask=mask, scale=scale)
        grad_query[queries] = _by_head(grads[0])
        grad_key.index_add_(0, keys.flatten(), _by_head(grads[1]).flatten(0, 1).float())
        grad_value.index_add_(0, keys.flatten(), _by_head(grads[2]).flatten(0, 1).float())
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _on_gpu(query: Tensor) -> bool:
    """Returns True if PyTorch's variable-length kernel computes the attention of `query`."""
    return query.device.type == "cuda"


def _groups(
    query: Tensor, path: Tensor, own_starts: Tensor, starts: Tensor, window: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Groups the datums by size: in a group, all B datums have q own tokens and k tokens in all. Yields three tensors
    for each group: the places of the datums' own tokens in the row [B, q], the places of all tokens of the datums in
    the row [B, k], and the mask to add to the scores [q, k]. Skips datums without own tokens."""
    sizes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    first_Q = own_starts.tolist()
    first_K = starts.tolist()
    for d in range(len(first_Q) - 1):
        size = (first_Q[d + 1] - first_Q[d], first_K[d + 1] - first_K[d])
        sizes.setdefault(size, []).append((first_Q[d], first_K[d]))
    for (q, k), firsts in sizes.items():
        if not q:
            continue
        queries = torch.stack([torch.arange(first, first + q) for first, _ in firsts])
        keys = torch.stack([path[first : first + k] for _, first in firsts])
        back = torch.arange(k - q, k)[:, None] - torch.arange(k)
        hidden = back < 0
        if window is not None:
            hidden |= back >= window
        yield queries, keys, torch.zeros(q, k, dtype=query.dtype).masked_fill_(hidden, float("-inf"))


def _by_head(states: Tensor) -> Tensor:
    """Returns states [B, T, heads, dim] as [B, heads, T, dim], and the other way round."""
    return states.transpose(1, 2)


def _bounds(window: int | None) -> tuple[int, int]:
    """Returns a causal window in the kernel's form: how many tokens before its own place a query sees at most (-1: no
    limit), and how many after it (0). `window` counts the query's own token too; None: no limit."""
    if window is None:
        return (-1, 0)
    return (window - 1, 0)


@shared_attention.register_fake
def _shapes(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    if _on_gpu(query):
        return torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@shared_attention_backward.register_fake
def _grad_shapes(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, path, own_starts, starts, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, path, own_starts, starts)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = shared_attention_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*grads, *[None] * 7)


shared_attention.register_autograd(_backward, setup_context=_save)
