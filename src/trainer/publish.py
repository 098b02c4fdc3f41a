"""The canary: log-probabilities of a fixed sequence, by which a replica proves that it uses what was published."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from trireme.core.weights import Canary

CANARY_TOKENS = 8
"""Enough for attention to look back and for every weight but the embeddings' rows to count; little beside the prefill
of the requests in flight, with which replicas compute them."""


def canary_tokens(vocab_size: int, max_seq_len: int) -> npt.NDArray[np.int32]:
    """Returns the fixed sequence, int32, shorter than `max_seq_len` (a replica samples one token more)."""
    position = np.arange(max(2, min(CANARY_TOKENS, max_seq_len - 1)), dtype=np.int64)
    return ((31 * position**2 + 17 * position + 3) % vocab_size).astype(np.int32)


def canary_tolerance(dtype: torch.dtype, largest_logit: float, num_layers: int) -> float:
    """Returns how much the logprobs of two right implementations may differ: 1e-4, or in low precision
    4 u * largest_logit * sqrt(num_layers), with u the unit roundoff (2^-8 in bfloat16).

    Rounding errors of the layers add up like independent ones and move logits in proportion. Between bfloat16 and
    float32, for random Qwen3 models of 2 to 28 layers, the largest difference was 0.8 to 1.4 times
    u * largest_logit * sqrt(num_layers); a single layer's missing MLP moved the logprobs by 5 to 90 times as much.
    """
    return max(1e-4, 2 * torch.finfo(dtype).eps * largest_logit * math.sqrt(num_layers))


@torch.no_grad()
def compute_canary(model: PreTrainedModel, max_seq_len: int, device: torch.device) -> Canary:
    """Computes the canary with the weights that the model uses, which are those that it publishes. Collective."""
    config = model.config.get_text_config()
    tokens = canary_tokens(config.vocab_size, max_seq_len)
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
    tolerance = canary_tolerance(logits.dtype, float(logits.abs().max()), config.num_hidden_layers)
    return Canary(tokens, logprobs.cpu().numpy(), tolerance)
