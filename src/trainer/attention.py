"""Attention over packed rows: several sequences one after the other, and none sees another.

It is registered with transformers under the name `PACKED`, so every model that takes its attention from the registry
can be packed. Two arguments of the model's forward pass give the positions of the sequences, under transformers' names:
`cu_seq_lens_q` int32 [sequences + 1], and `max_length_q`, the tokens of the longest one. Without them each row is one
sequence. A row in which each common prefix stands once has `path` too, and `cu_seq_lens_k` and `max_length_k` for the
sequences along `path` (`trainer.shared_attention`). Models make no mask for an attention of this name.

On GPUs in 16 bits, PyTorch's variable-length kernel skips pairs of different sequences. It is FlashAttention 2, or a
newer one that is installed and computes the same (`choose_kernel`). Elsewhere a mask over all pairs of tokens gives
the same result, with work that grows with the square of the row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trainer.shared_attention import shared_attention
from trireme.core.errors import BadInput

PACKED = "packed"
NEWER = (4, 3)
"""Versions of FlashAttention that are tried before version 2, which PyTorch contains. Version 4 is the package
flash-attn-4, for GPUs of capability 9 and 10 (Hopper, Blackwell); version 3 is the module flash_attn_interface."""


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if PyTorch's variable-length attention kernel runs on this device and dtype."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def choose_kernel(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_dim: int) -> str:
    """Chooses the variable-length attention kernel of this process: the first of `NEWER` that computes right outputs
    and gradients at these sizes, else FlashAttention 2. Returns the kernel's name, and why newer ones cannot be
    used."""
    failures = []
    for version in NEWER:
        try:
            activate_flash_attention_impl(f"FA{version}")
            _try_kernel(device, dtype, heads, key_heads, head_dim)
        except Exception as error:  # not installed, another GPU, a head of another size: each fails in its own way
            if current_flash_attention_impl() is not None:
                restore_flash_attention_impl()
            failures.append(f"{version} cannot be used here ({type(error).__name__}: {error})")
        else:
            return "; ".join([f"FlashAttention {version}", *failures])
    return "; ".join(["FlashAttention 2", *failures])


def _try_kernel(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_dim: int) -> None:
    """Computes attention and its gradients on random sequences, by the kernel and by `masked_attention` in float32.
    Tries two packed sequences, and then a row of three sequences in which each common prefix stands once. In this row
    the third sequence equals the first, so it has no tokens, and no queries, of its own. Raises RuntimeError if the
    results differ by more than the rounding of 16 bits."""
    longest = 13
    starts = torch.tensor([0, 13, 24, 37], dtype=torch.int32, device=device)
    own_starts = torch.tensor([0, 13, 17, 17], dtype=torch.int32, device=device)
    path = torch.tensor([*range(13), *range(7), *range(13, 17), *range(13)], device=device)
    own_places = torch.tensor([*range(13), *range(20, 24)], device=device)  # in the path

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _run_kernel(q, k, v, starts[:3], longest, (-1, 0), None)

    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return shared_attention(q, k, v, path, own_starts, starts, longest, longest, None, None)[0]

    def exactly_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return masked_attention(q, k, v, starts[:3], None)

    def exactly_shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return masked_attention(q[path], k[path], v[path], starts, None)[own_places]

    generator = torch.Generator(device).manual_seed(0)
    for kernel, exactly, tokens in ((packed, exactly_packed, 24), (shared, exactly_shared, 17)):
        shapes = [(tokens, count, head_dim) for count in (heads, key_heads, key_heads, heads)]
        *states, upstream = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
        q, k, v = (state.requires_grad_() for state in states)
        out = kernel(q, k, v)
        exact = [state.detach().float().requires_grad_() for state in states]
        expected = exactly(exact[0], exact[1], exact[2])
        outputs = [out, *torch.autograd.grad(out, (q, k, v), upstream)]
        exact_outputs = [expected, *torch.autograd.grad(expected, exact, upstream.float())]
        for name, got, right in zip(("output", "dq", "dk", "dv"), outputs, exact_outputs, strict=True):
            off = float((got.float() - right).detach().norm() / right.detach().norm())
            if not off < 0.03:  # rounding to bfloat16 in several places: some 2^-8 each
                raise RuntimeError(f"its {name} differs by {off:.2g} from that in float32")


def _run_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    window: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """Runs the variable-length kernel on packed `query` [T, heads, dim] and `key`, `value` [T, key heads, dim]; returns
    [T, heads, dim]. `starts` int32 [sequences + 1]: where each sequence begins; `longest`: the number of tokens of the
    longest sequence."""
    out = varlen_attn(
        query, key, value, starts, starts, longest, longest, scale=scale, window_size=window, enable_gqa=True
    )
    assert isinstance(out, Tensor), "no other output was requested"
    return out


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
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    path: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Computes causal attention within each sequence of packed rows. `query` is [B, heads, L, dim], `key` and `value`
    are [B, key heads, L, dim]; returns ([B, L, heads, dim], None). The module's docstring explains the arguments from
    `cu_seq_lens_q` to `path`.

    Raises BadInput for a mask, dropout or a soft cap. Other `options` are ignored: at the start `trainer.proof` shows
    that ignoring them changes nothing. It could not show this for a soft cap, which changes only large scores.
    """
    if options.get("softcap") is not None or attention_mask is not None or dropout:
        if attention_mask is not None:
            feature = "a mask"
        elif dropout:
            feature = "dropout"
        else:
            feature = "a soft cap"
        raise BadInput(
            f"{type(module).__name__} uses {feature}, which does not work if several sequences share a row: set "
            "--trainer.packing rows (one sequence per row)"
        )
    batch, _, length, _ = query.shape
    starts = cu_seq_lens_q
    longest = max_length_q
    if starts is None or longest is None:
        starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        longest = length
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))  # [B L, heads, dim]
    if path is not None:
        assert cu_seq_lens_k is not None, "a path has bounds"
        assert max_length_k is not None, "a path has bounds"
        bounds = starts, cu_seq_lens_k, longest, max_length_k
        out = shared_attention(q, k, v, path, *bounds, sliding_window, scaling)[0]
    elif has_kernel(query.device, query.dtype):
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        out = _run_kernel(q, k, v, starts, longest, window, scaling)
    else:
        out = masked_attention(q, k, v, starts, sliding_window, scaling)
    return out.view(batch, length, *out.shape[1:]), None


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    sliding_window: int | None,
    scale: float | None = None,
) -> Tensor:
    """Computes the same as the variable-length kernel, with a mask [T, T]. `query` is [T, heads, dim], `key` and
    `value` are [T, key heads, dim]; returns [T, heads, dim]. `starts` int32 [sequences + 1]: where each sequence
    begins."""
    place = torch.arange(len(query), device=query.device)
    sequence = torch.searchsorted(starts[1:].to(place.dtype), place, right=True)
    back = place[:, None] - place
    mask = (sequence[:, None] == sequence) & (back >= 0)
    if sliding_window is not None:
        mask &= back < sliding_window
    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))  # [1, heads, T, dim]
    # Always grouped: in a traced layer with LoRA a comparison of numbers of heads is no bool, which ends the graph.
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


AttentionInterface.register(PACKED, packed_attention)
