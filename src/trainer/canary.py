"""The canary: log-probabilities of a fixed sequence, by which a replica proves that it uses the published weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from trainer.logprobs import token_logprobs
from trireme.core.weights import AFTER_CANARY, EXACT, ROUNDED, SHORTEST_CANARY, Canary
from trireme.process import trace

CANARY_TOKENS = 16
"""For a model without experts: each token passes through all of its matrices, so these are enough for a mean that does
not depend on single tokens. More would cost time on CPUs, in trainer and replicas."""
TOKENS_OF_EXPERTS = 64
"""Enough for nearly all experts of a layer to be chosen (a token takes 8 of 128), and for a mean in which single
tokens, routed differently after rounding, count little."""


def canary_tokens(vocab_size: int, max_seq_len: int, *, experts: bool) -> npt.NDArray[np.int32]:
    """Returns the canary's fixed sequence of tokens, int32 [T]; a model with `experts` gets a longer sequence. T leaves
    AFTER_CANARY tokens free below `max_seq_len`, because a replica samples more tokens after the sequence."""
    length = TOKENS_OF_EXPERTS if experts else CANARY_TOKENS
    position = np.arange(max(SHORTEST_CANARY, min(length, max_seq_len - AFTER_CANARY)), dtype=np.int64)
    return ((31 * position**2 + 17 * position + 3) % vocab_size).astype(np.int32)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # else compiled layers would be compiled again, for one short row
def compute_canary(
    model: PreTrainedModel, dtype: torch.dtype, tokens: npt.NDArray[np.int32], device: torch.device
) -> Canary:
    """Returns the canary: the log-probabilities of `tokens`, int32 [T], under the weights that `model` publishes,
    computed by the same code as in training. `dtype`: the dtype in which the model computes; it decides how far a
    replica's result may differ. Collective."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)[None]
    inputs = ids[:, :-1]
    targets = ids[:, 1:]
    with trace.span("canary"):
        logprobs = token_logprobs(model, inputs, targets, torch.ones(targets.shape, device=device))[0]
    return Canary(tokens, logprobs.cpu().numpy(), EXACT if dtype == torch.float32 else ROUNDED)
