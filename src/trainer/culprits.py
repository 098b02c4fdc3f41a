"""Which datums are to blame for a loss, or a gradient, that is not finite. Looked for only then."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.batching import ShardOutput
from trainer.losses import LossFn
from trireme.core.types import TokenBatch


def is_finite(loss: Tensor, p: Tensor) -> bool:
    """Whether a loss and its gradient by the log-probabilities are finite; after the backward pass."""
    return bool(loss.isfinite()) and (p.grad is None or bool(p.grad.isfinite().all()))


def culprits(batch: TokenBatch, output: ShardOutput, loss: LossFn, loss_config: Mapping[str, float]) -> tuple[int, ...]:
    """The datums of `output` whose loss alone, or its gradient by their log-probabilities, is not finite. A loss is a
    sum over sequences: where it is not finite that of a datum is not, unless only their sum is too large."""
    found, done = [], 0
    for d in output.datums:
        part = slice(int(batch.offsets[d]), int(batch.offsets[d + 1]))
        end = done + part.stop - part.start
        p = torch.tensor(output.logprobs[done:end], requires_grad=True)
        value, _ = loss(p, {name: torch.tensor(column[part]) for name, column in batch.columns.items()}, loss_config)
        value.backward()
        if not is_finite(value, p):
            found.append(d)
        done = end
    return tuple(found)
