"""Log-probabilities of given tokens, without holding the logits of all tokens in memory.

With a vocabulary of 150,000 the logits of 4,096 tokens are 2.5 GB in float32, and plain autograd keeps several such
arrays. Here the output matrix is applied to one chunk of tokens after the other, in the forward pass and again in the
backward pass. Between the two passes are kept: the hidden states, the logarithm of the softmax's denominator for each
token, and the logits of the last chunk; a single chunk is therefore not computed twice.

What comes between the products is done by tensor operations on CPUs, and by two kernels (`trainer.head_kernels`) on
GPUs where they compute the same (`why_unfused`).

Logits are float32 also where the model computes in 16 bits (`model.head_dtype`): rounded to bfloat16, one of 20 would
be off by up to 1/16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from trainer.head_kernels import head_backward, head_forward
from trainer.transfers import to_device
from trireme.core.errors import BadInput
from trireme.core.prefixes import Numbers
from trireme.plan.memory import chunk_logits

METHOD = "token_logprobs"
CAST_ELEMENTS = 2**19
"""Elements of the output matrix that a CPU casts at a time: 2 MiB of float32, which stay in its cache. A cast of the
whole matrix would go to new memory each time, which the system gives page by page."""
LOGPROB_BOUND = 1e-4
"""Largest difference between a log-probability with kernels and without, in nats."""


def add_token_logprobs(
    model: PreTrainedModel, head_dtype: torch.dtype = torch.float32, *, fused: bool = False
) -> PreTrainedModel:
    """Gives `model` the method that `token_logprobs` calls, and returns `model`. Call it after `fully_shard`: FSDP
    treats the method as a forward pass. Logits are computed in `head_dtype`: float32, or the dtype in which the model
    computes. `fused`: as in `SelectedLogprobs`.

    Raises BadInput if the model has no output matrix, or if its class does not name the part that computes hidden
    states (`base_model`). `trainer.proof` shows at the start that the model's logits are its hidden states times the
    output matrix.
    """
    name = type(model).__name__.removeprefix("FSDP")
    if model.get_output_embeddings() is None:
        raise BadInput(f"{name} has no output matrix: its logprobs are not supported")
    if model.base_model is model:
        raise BadInput(
            f"{name} does not say which part of it computes hidden states (base_model): its logprobs are not supported"
        )
    setattr(model, METHOD, partial(_forward, model, head_dtype, fused))
    register_fsdp_forward_method(model, METHOD)
    return model


def _forward(
    model: PreTrainedModel,
    head_dtype: torch.dtype,
    fused: bool,
    tokens: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    places: Tensor | None = None,
    bounds: Numbers | None = None,
    **sequences: object,
) -> Tensor:
    hidden = model.base_model(input_ids=tokens, use_cache=False, **sequences).last_hidden_state.flatten(0, 1)
    if places is not None:
        hidden = hidden.index_select(0, places)
    rows, weight = _head(model, hidden)
    # FSDP forbids to return a view
    if temperatures is None:
        temperature = None
    else:
        temperature = temperatures.flatten()
    return SelectedLogprobs.apply(rows, weight, targets.flatten(), temperature, head_dtype, bounds, fused)


def _head(model: PreTrainedModel, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two factors whose product is the logits: hidden states [T, H] and the output matrix [V, H]. A bias b adds
    a column to both factors, and an adapter of rank r adds r columns: W h + b + B (A h) = [W b B] [h; 1; A h]."""
    head = model.get_output_embeddings()
    columns = [hidden]
    weights = [head.weight]
    if getattr(head, "bias", None) is not None:
        columns.append(torch.ones_like(hidden[:, :1]))
        weights.append(head.bias[:, None])
    if not getattr(head, "disable_adapters", True):  # or there are none
        for name in head.active_adapters:
            columns.append(head.lora_A[name](head.lora_dropout[name](hidden)) * head.scaling[name])
            weights.append(head.lora_B[name].weight)
    if len(columns) == 1:
        return (columns[0], weights[0])
    return (torch.cat(columns, -1), torch.cat(weights, -1))


def token_logprobs(
    model: PreTrainedModel, tokens: Tensor, targets: Tensor, temperatures: Tensor | None, **sequences: object
) -> Tensor:
    """Returns the log-probability of each target under logits / temperature: float32 [B, L].

    `tokens`, `targets` int64 [B, L], padded on the right, which needs no mask in a causal model. `temperatures` float32
    [B, L]; None: all 1. For packed rows B is 1, and `sequences` has the arguments that `trainer.attention` names and
    `position_ids` int64 [1, L], from 0 in each sequence.
    """
    logprobs: Tensor = getattr(model, METHOD)(tokens, targets, temperatures, **sequences)
    return logprobs.view(tokens.shape)


def chosen_logprobs(
    model: PreTrainedModel,
    tokens: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    places: Tensor,
    bounds: Numbers | None = None,
    **sequences: object,
) -> Tensor:
    """Returns the log-probabilities of targets at chosen places of the rows: float32 [M], in the order of `targets`.

    `tokens` int64 [B, L], `sequences`: as in `token_logprobs`. `places` int64 [N]: the chosen places in the flattened
    rows; `temperatures` float32 [N]: the temperature of each place, None: all 1. `targets` int64 [M]. If places have
    several targets, `bounds` (a numpy array) says which targets belong to which place, as in `SelectedLogprobs`. For a
    row with shared prefixes, `places`, `temperatures` and `bounds` come from `trainer.shared_rows.HeadRows`.
    """
    logprobs: Tensor = getattr(model, METHOD)(tokens, targets, temperatures, places, bounds, **sequences)
    return logprobs


class SelectedLogprobs(torch.autograd.Function):
    """Computes log softmax(hidden [T, H] weight^T [H, V] / temperature [T]) at targets int64 [M], chunk by chunk:
    float32 [M]. If `temperature` is None it counts as 1, and the division is skipped (it takes a tenth of a small
    model's time).

    `bounds` int64 [T + 1]: row t has the targets from `bounds[t]` up to, not including, `bounds[t + 1]`. None: each row
    has one target. Logits have `head_dtype`, products of the backward pass the dtype of `hidden`; sums over the
    vocabulary and over chunks are float32. With p the result, z = logits / temperature and s = softmax(z): dp/dz =
    onehot(target) - s, so a row's gradient is sum_m g_m onehot(target_m) - (sum_m g_m) s. `fused`: all but the products
    is computed by kernels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        head_dtype: torch.dtype = torch.float32,
        bounds: Numbers | None = None,
        fused: bool = False,
    ) -> Tensor:
        normalizers = []
        selected = []
        ctx.logits = chunk_logits(_free_bytes(hidden.device))
        for rows in _chunks(len(hidden), len(weight), ctx.logits):
            logits = _logits(hidden[rows], weight, head_dtype)
            divisor = None if temperature is None else temperature[rows]
            span, row = _targets_of(rows, bounds, hidden.device)
            if fused:
                normalizer, logprobs = head_forward(logits, divisor, targets[span], row)
            else:
                logits = _scaled(logits, divisor)
                normalizer = logits.logsumexp(-1)
                logprobs = logits[row, targets[span]] - normalizer[row]
            selected.append(logprobs)
            normalizers.append(normalizer)
        ctx.head_dtype = head_dtype
        ctx.bounds = bounds
        ctx.fused = fused
        ctx.save_for_backward(hidden, weight, targets, temperature, torch.cat(normalizers), logits)
        return torch.cat(selected)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None, None]:
        hidden, weight, targets, temperature, normalizer, last = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        else:
            grad_weight = None
        for number, rows in enumerate(reversed(_chunks(len(hidden), len(weight), ctx.logits))):
            logits = _logits(hidden[rows], weight, ctx.head_dtype) if number else last
            divisor = None if temperature is None else temperature[rows]
            span, row = _targets_of(rows, ctx.bounds, hidden.device)
            if ctx.fused:
                grad_logits = head_backward(
                    logits, divisor, targets[span], row, normalizer[rows], grad[span], hidden.dtype
                )
            else:
                scaled = _scaled(logits, divisor) if number else logits
                total = torch.zeros_like(normalizer[rows]).scatter_add_(0, row, grad[span])
                grad_z = scaled.sub_(normalizer[rows, None]).exp_().mul_(-total[:, None])
                grad_z.view(-1).scatter_add_(0, row * len(weight) + targets[span], grad[span])
                if divisor is not None:
                    grad_z.div_(divisor[:, None])
                grad_logits = grad_z.to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None


def _targets_of(rows: slice, bounds: Numbers | None, device: torch.device) -> tuple[slice, Tensor]:
    """Returns the targets of the rows `rows` as a slice, and the row number within `rows` of each target, int64.
    `bounds`: as in `SelectedLogprobs`."""
    if bounds is None:
        return rows, torch.arange(rows.stop - rows.start, device=device)
    inside = bounds[rows.start : rows.stop + 1]
    row = np.repeat(np.arange(len(inside) - 1), np.diff(inside))
    return slice(int(inside[0]), int(inside[-1])), to_device(row, device)


def _free_bytes(device: torch.device) -> int | None:
    """Returns the bytes that can be allocated on a GPU, including memory that PyTorch has reserved and does not use,
    and within the limit of this process (`Mesh.leave_room`). Returns None on a CPU. Returns None in deterministic mode
    too, because free memory differs between runs and would change the chunks, and so the order of sums."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return None
    free, memory = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    limit = int(memory * torch.cuda.get_per_process_memory_fraction(device))
    return max(0, min(free + torch.cuda.memory_reserved(device) - used, limit - used))


def _chunks(tokens: int, vocabulary: int, logits: int) -> list[slice]:
    """Returns consecutive slices that cover `tokens` tokens. `logits`: the most logits that a slice may have, where
    each token has as many logits as the `vocabulary`. A slice has at least one token, even if this is above the
    limit."""
    size = max(1, logits // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _scaled(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Returns logits [T, V] / temperature [T] in float32. Overwrites `logits` if they are float32."""
    if temperature is None:
        return logits.float()
    return logits.float().div_(temperature[:, None])


def _logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the product of hidden [T, H] and weight^T [H, V] in `dtype`."""
    if hidden.dtype == dtype:
        return hidden @ weight.T
    return _wide_product(hidden, weight, dtype)


def _wide_product(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the product of hidden [T, H] and weight^T [H, V] in `dtype`, which is wider than the dtype of the
    factors. Never holds a copy of all of `weight` in `dtype`."""
    try:
        return torch.mm(hidden, weight.T, out_dtype=dtype)
    except NotImplementedError:  # reason: torch's own error on CPUs; torch 2.13 has this product for CUDA alone
        product = hidden.new_empty(len(hidden), len(weight), dtype=dtype)
        wide = hidden.to(dtype)
        at_once = max(1, CAST_ELEMENTS // weight.shape[1])
        for start in range(0, len(weight), at_once):
            rows = slice(start, start + at_once)
            torch.mm(wide, weight[rows].to(dtype).T, out=product[:, rows])
        return product


def why_unfused(device: torch.device, dtype: torch.dtype, head_dtype: torch.dtype, vocabulary: int) -> str:
    """Computes log-probabilities of random hidden states, and their gradients, with kernels and without. Returns "" if
    both agree within rounding; else why kernels cannot be used. Rows have two targets, none and one, with temperatures
    and without."""
    generator = torch.Generator(device).manual_seed(0)
    hidden, weight = (torch.randn(size, 64, generator=generator, device=device).to(dtype) for size in (3, vocabulary))
    factors = (hidden.requires_grad_(), weight.requires_grad_())
    targets = torch.tensor([1, vocabulary - 1, 0], device=device)
    temperature = torch.tensor([0.7, 1.0, 1.6], device=device)
    upstream = torch.tensor([1.0, -2.0, 0.5], device=device)
    for divisor in (None, temperature):
        options = (targets, divisor, head_dtype, np.array([0, 2, 2, 3]))
        try:
            plain, fused = (SelectedLogprobs.apply(*factors, *options, kernels) for kernels in (False, True))
            pairs = [torch.autograd.grad(p, factors, upstream) for p in (plain, fused)]
        except Exception as error:  # a compiler fails in its own ways
            return f"{type(error).__name__}: {error}"
        distance = float((plain - fused).detach().abs().max())
        if not distance <= LOGPROB_BOUND:
            return f"log-probabilities differ by {distance:.3g}"
        for right, got in zip(*pairs, strict=True):
            distance = float((got.float() - right.float()).norm() / right.float().norm())
            if not distance <= max(LOGPROB_BOUND, torch.finfo(dtype).eps):
                return f"a gradient differs by {distance:.3g} of its norm"
    return ""
