"""Log-probabilities of given tokens, without the logits of all of them ever being there at once.

With a vocabulary of 150,000 the logits of 4,096 tokens are 2.5 GB in float32, and plain autograd keeps several such
arrays. Here the output matrix is applied to a chunk of tokens at a time, forward and again backward; what is kept from
one to the other are the hidden states and one number per token, the logarithm of its softmax's denominator.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from trireme.errors import BadInput

CHUNK_LOGITS = 2**24
"""Logits that are there at once: 64 MiB in float32, or one token's where the vocabulary is larger."""
METHOD = "token_logprobs"


def add_token_logprobs(model: PreTrainedModel) -> None:
    """Gives `model`, after `fully_shard`, the method `token_logprobs(tokens, targets, temperatures)` that
    `token_logprobs` below calls; to FSDP it is a forward pass. Raises BadInput for a model that does more to its
    hidden states than to multiply them by a matrix."""
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


def _forward(model: PreTrainedModel, tokens: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    temperature = temperatures[:, None].expand(tokens.shape).flatten()
    weight = model.get_output_embeddings().weight
    return SelectedLogprobs.apply(hidden.flatten(0, 1), weight, targets.flatten(), temperature)  # no view: FSDP's wish


def token_logprobs(model: PreTrainedModel, tokens: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """Log-probability of each target under logits / temperature: float32 [B, L].

    `tokens`, `targets` int64 [B, L], padded on the right, which a causal model needs no mask for: no token sees a later
    one, and positions count from the left. `temperatures` float32 [B].
    """
    logprobs: Tensor = getattr(model, METHOD)(tokens, targets, temperatures)
    return logprobs.view(tokens.shape)


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
        ctx.save_for_backward(hidden, weight, targets, temperature, normalizer)
        return torch.cat(selected) - normalizer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets, temperature, normalizer = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(len(hidden), len(weight)):
            scaled = _scaled_logits(hidden[rows], weight, temperature[rows])
            grad_z = scaled.sub_(normalizer[rows, None]).exp_().mul_(-grad[rows, None])
            grad_z.scatter_add_(-1, targets[rows, None], grad[rows, None])
            grad_logits = grad_z.div_(temperature[rows, None]).to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            grad_weight += grad_logits.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    """float32 [T, V], which nobody else holds."""
    return (hidden @ weight.T).float().div_(temperature[:, None])
