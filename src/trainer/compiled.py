"""Compiled layers: a trial at the start compiles them and compares their results with the uncompiled layers.

A decoder layer is compiled once for all lengths of a micro-batch. A layer that does not compile as one graph stays
uncompiled, because its parts would be slower than the whole uncompiled layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from trainer.batching import MicroBatch
from trainer.mesh import Mesh
from trainer.model import Sharding
from trainer.passes import Passes
from trireme.core.batch import BatchPart, TokenBatch

SEQUENCES = 16
LENGTH = 123
"""The most tokens of a sequence in the trial batches; no attention head has this size."""
LONGEST = 300
"""Longest part of a compiler's message that is passed on, in characters."""
NORM_BOUND = 0.05
"""The share by which the norms of the gradients may differ."""


def trial_batches(vocabulary: int, most_tokens: int, longest: int) -> list[TokenBatch]:
    """Returns two batches with which `why_uncompiled` compares compiled and uncompiled layers. One has about
    `most_tokens` tokens, the other has SEQUENCES sequences. Both sizes are tried because sums over many tokens and sums
    over few are compiled to different code. Returns only one batch if at most SEQUENCES sequences fit into
    `most_tokens`. `longest`: the most tokens of a sequence."""
    length = max(2, min(LENGTH, longest, most_tokens // 2))
    counts = (most_tokens // length, min(SEQUENCES, most_tokens // length))
    return [_trial_batch(vocabulary, length, max(2, count)) for count in dict.fromkeys(counts)]


def trial_micro_batches(batch: TokenBatch, sharding: Sharding) -> list[MicroBatch]:
    """Returns the micro-batches in which `why_uncompiled` computes `batch`. In the first one, each datum is whole. If
    the trainer shares prefixes, a second one tries that layout too: each datum is treated as if it shared a prefix with
    the datum before it. This prefix is half as long as the shorter of the two datums."""
    datums = tuple(range(len(batch)))
    micro_batches = [MicroBatch(datums)]
    if sharding.shares:
        shared = np.minimum(batch.lengths[1:], batch.lengths[:-1]) // 2
        micro_batches.append(MicroBatch(datums, (0, *shared.tolist())))
    return micro_batches


def _trial_batch(vocabulary: int, length: int, count: int) -> TokenBatch:
    """Returns a batch of `count` sequences of different lengths, at most `length` tokens each."""
    lengths = [max(1, length - number % SEQUENCES) for number in range(count)]
    tokens = (31 * np.arange(sum(lengths) + 1) ** 2 + 17) % vocabulary
    return TokenBatch(
        tokens[:-1].astype(np.int32),
        np.concatenate([[0], np.cumsum(lengths)]),
        {"target_tokens": tokens[1:].astype(np.int64)},
        np.ones(len(lengths), np.float32),
    )


def why_uncompiled(
    model: PreTrainedModel,
    sharding: Sharding,
    passes: Passes,
    mesh: Mesh,
    batches: Sequence[TokenBatch],
    tolerance: float,
    *,
    whole: bool,
) -> str:
    """Computes log-probabilities and gradients of `batches` with compiled and with uncompiled layers. Returns "" if the
    results agree on all ranks. Else returns why layers cannot be compiled, and makes this process compile nothing from
    now on.

    `tolerance`: the largest difference of a log-probability that rounding explains. `whole`: a layer has to compile as
    a single graph. Leaves no gradient. Collective.
    """
    breaks = set(counters["graph_break"])
    reasons = (
        _tried(model, sharding, passes, mesh, BatchPart.of(batch), micro, tolerance)
        for batch in batches
        for micro in trial_micro_batches(batch, sharding)
    )
    reason = next(filter(None, reasons), "")
    if whole and not reason and (new_breaks := set(counters["graph_break"]) - breaks):
        reason = f"they are no single graph ({_in_one_line(next(iter(new_breaks)))})"
    failures = torch.tensor(float(bool(reason)), device=mesh.device)
    mesh.sum_over_ranks(failures)
    if not float(failures):
        return ""
    torch.compiler.set_stance("force_eager")
    return reason or "another shard cannot compile them"


def _tried(
    model: PreTrainedModel,
    sharding: Sharding,
    passes: Passes,
    mesh: Mesh,
    part: BatchPart,
    micro: MicroBatch,
    tolerance: float,
) -> str:
    with torch.compiler.set_stance("force_eager"):
        expected, norm = _pass(model, sharding, passes, mesh, part, micro)
    try:
        compiled, compiled_norm = _pass(model, sharding, passes, mesh, part, micro)
    except Exception as error:  # a compiler fails in its own ways
        return f"{type(error).__name__}: {_in_one_line(str(error))}"
    distance = float((compiled - expected).abs().max())
    if not distance <= tolerance:
        return f"log-probabilities differ by {distance:.3g} from those of the layers uncompiled"
    if not math.isclose(compiled_norm, norm, rel_tol=NORM_BOUND, abs_tol=1e-6):
        return f"the gradient's norm is {compiled_norm:.4g}, uncompiled {norm:.4g}"
    return ""


def _in_one_line(text: str) -> str:
    return " ".join(text.split())[:LONGEST]


def _pass(
    model: PreTrainedModel, sharding: Sharding, passes: Passes, mesh: Mesh, part: BatchPart, micro: MicroBatch
) -> tuple[Tensor, float]:
    """Computes a micro-batch of `part`, forward and backward. Returns its log-probabilities [T], and the norm, over all
    shards, of the gradient of their sum. Drops the gradient."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        with sharding.layout_of(model, [micro]), sharding.accumulating(model) as next_pass:
            next_pass(True)
            p = passes.logprobs(model, part, micro)
            p.sum().backward()
        squares = [p.grad.to_local().double().square().sum() for p in parameters if p.grad is not None]
        return p.detach(), math.sqrt(mesh.sum_over_shards(torch.stack(squares).sum()))
    finally:
        for parameter in parameters:
            parameter.grad = None
