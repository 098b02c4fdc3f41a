"""Log-probabilities of given tokens, without the logits of all of them ever being there at once.

With a vocabulary of 150,000 the logits of 4,096 tokens are 2.5 GB in float32, and plain autograd keeps several such
arrays. Here the output matrix is applied to a chunk of tokens at a time, forward and again backward; what is kept from
one to the other are the hidden states, one number per token, the logarithm of its softmax's denominator, and the logits
of the last chunk: where there is no other, nothing is computed twice.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from trireme.core.errors import BadInput

CHUNK_LOGITS = 2**24
"""Logits that are there at once: 64 MiB in float32, or one token's where the vocabulary is larger."""
METHOD = "token_logprobs"


def add_token_logprobs(model: PreTrainedModel) -> None:
    """Gives `model`, after `fully_shard`, the method that `token_logprobs` and `packed_logprobs` below call; to FSDP it
    is a forward pass. Raises BadInput for a model that does more to its hidden states than to multiply them by a
    matrix."""
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise BadInput(
            f"{type(model).__name__} has no output matrix, or one with a bias: its logprobs are not supported"
        )
    scaled = [n for n in ("logit_scale", "final_logit_softcapping", "logits_scaling") if _option(model, n)]
    if scaled:
        raise BadInput(f"{type(model).__name__} changes its logits ({', '.join(scaled)}): not supported yet")
    setattr(model, METHOD, MethodType(_forward, model))
    register_fsdp_forward_method(model, METHOD)


def _option(model: PreTrainedModel, name: str) -> bool:
    return getattr(model.config.get_text_config(), name, None) not in (None, 1, 1.0)


def _forward(model: PreTrainedModel, tokens: Tensor, targets: Tensor, temperatures: Tensor, **sequences: Any) -> Tensor:
    hidden = model.base_model(input_ids=tokens, use_cache=False, **sequences).last_hidden_state
    rows, weight = _head(model, hidden.flatten(0, 1))
    return SelectedLogprobs.apply(rows, weight, targets.flatten(), temperatures.flatten())  # no view: FSDP's wish


def _head(model: PreTrainedModel, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What to multiply for the logits: hidden states [T, H] and the output matrix [V, H]; where that has an adapter of
    rank r, both with r more columns, W h + B (A h) being [W B] [h; A h]."""
    head = model.get_output_embeddings()
    if getattr(head, "disable_adapters", True):  # or there are none
        return hidden, head.weight
    adapters = head.active_adapters
    narrow = [head.lora_A[name](head.lora_dropout[name](hidden)) * head.scaling[name] for name in adapters]
    return torch.cat([hidden, *narrow], -1), torch.cat([head.weight, *(head.lora_B[n].weight for n in adapters)], -1)


def token_logprobs(model: PreTrainedModel, tokens: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """Log-probability of each target under logits / temperature: float32 [B, L].

    `tokens`, `targets` int64 [B, L], padded on the right, which a causal model needs no mask for: no token sees a later
    one, and positions count from the left. `temperatures` float32 [B].
    """
    logprobs: Tensor = getattr(model, METHOD)(tokens, targets, temperatures[:, None].expand(tokens.shape))
    return logprobs.view(tokens.shape)


def packed_logprobs(
    model: PreTrainedModel, tokens: Tensor, targets: Tensor, temperatures: Tensor, positions: Tensor, starts: Tensor
) -> Tensor:
    """The same of sequences one after the other, in a model whose attention is `trainer.attention.PACKED`: float32 [T].

    `tokens`, `targets`, `positions` (from 0 in each sequence) int64 [T], `temperatures` float32 [T]; sequence i has the
    tokens starts[i] : starts[i + 1], int32 on the CPU.
    """
    sequences = {
        "position_ids": positions[None],
        "cu_seq_lens_q": starts.to(tokens.device),
        "max_length_q": int(starts.diff().max()),
    }
    logprobs: Tensor = getattr(model, METHOD)(tokens[None], targets[None], temperatures[None], **sequences)
    return logprobs


class SelectedLogprobs(torch.autograd.Function):
    """log softmax(hidden [T, H] weight^T [H, V] / temperature [T]) at targets int64 [T]: float32 [T].

    Products are computed in the dtype of `hidden`, sums over the vocabulary and over tokens in float32. With p the
    result, z = logits / temperature and s = softmax(z): dp/dz = onehot(target) - s.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
        normalizers, selected = [], []
        for rows in _chunks(len(hidden), len(weight)):
            scaled = _scaled_logits(hidden[rows], weight, temperature[rows])
            selected.append(scaled.gather(-1, targets[rows, None]).squeeze(-1))
            normalizers.append(scaled.logsumexp(-1))
        normalizer = torch.cat(normalizers)
        ctx.save_for_backward(hidden, weight, targets, temperature, normalizer, scaled)
        return torch.cat(selected) - normalizer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, targets, temperature, normalizer, last = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for number, rows in enumerate(reversed(_chunks(len(hidden), len(weight)))):
            scaled = _scaled_logits(hidden[rows], weight, temperature[rows]) if number else last
            grad_z = scaled.sub_(normalizer[rows, None]).exp_().mul_(-grad[rows, None])
            grad_z.scatter_add_(-1, targets[rows, None], grad[rows, None])
            grad_logits = grad_z.div_(temperature[rows, None]).to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    """float32 [T, V], which nobody else holds."""
    return (hidden @ weight.T).float().div_(temperature[:, None])
