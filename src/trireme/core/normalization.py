"""How the tokens of a substep weigh in its gradient: `trainer.loss_normalization`.

A loss is a sum over tokens, and the gradient of a substep is that of the sum over all its minibatches, divided once at
its end. So each kind is a weight for each token and a divisor that minibatches add to. With N sequences i whose tokens
have the weights m_t (the mask, or the weights of supervised examples), L_i their sum in the sequence:

    token_mean                    sum_i sum_t m_t l_t / sum_i L_i          (DAPO, arXiv:2503.14476)
    sequence_mean_token_mean      1/N sum_i (sum_t m_t l_t / L_i)          (GRPO, arXiv:2402.03300; GSPO, 2507.18071)
    sequence_mean_token_sum       1/N sum_i sum_t m_t l_t
    sequence_mean_token_sum_norm  1/N sum_i sum_t m_t l_t / C              (Dr. GRPO, arXiv:2503.20783)
    sum                           sum_i sum_t m_t l_t                      (Tinker)

A sequence is a rollout, however many datums its tokens are in, or an example. One without tokens that count (L_i = 0:
cut by length, under `overlong_filter`) is not among the N. C is the most tokens that a sequence may have.
`sequence_mean` is the name that `sequence_mean_token_sum` had before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from trireme.core.types import TokenBatch

LossNormalization = Literal[
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "sum",
    "sequence_mean",
]


@dataclass(frozen=True)
class Normalization:
    """One kind of normalisation, and what it needs to know."""

    kind: LossNormalization
    longest: int | None
    """C, in tokens."""

    def apply(self, batch: TokenBatch, column: str) -> tuple[TokenBatch, float]:
        """Returns a minibatch with its weights m_t, the float32 `column`, as the kind wants them, and what it adds to
        the divisor of its substep; 0 where nothing is divided. Must see all datums of a sequence."""
        sequence_T = np.repeat(batch.sequences, batch.lengths)
        total_N = np.bincount(sequence_T, batch.columns[column])  # float64
        number = float(np.count_nonzero(total_N))
        if self.kind == "token_mean":
            return batch, float(total_N.sum())
        if self.kind == "sum":
            return batch, 0.0
        if self.kind == "sequence_mean_token_sum_norm":
            assert self.longest is not None, "checked with the configuration"
            return batch, number * self.longest
        if self.kind == "sequence_mean_token_mean":
            share = batch.columns[column] / np.where(total_N == 0, 1.0, total_N)[sequence_T]
            batch = replace(batch, columns={**batch.columns, column: share.astype(np.float32)})
        return batch, number
