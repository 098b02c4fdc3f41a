"""Computes how the tokens of a substep weigh in its gradient: `trainer.loss_normalization`.

A loss is a sum over tokens, and the gradient of a substep is the gradient of the sum over all its minibatches, divided
once at its end. So each kind is a weight for each token and a divisor that minibatches add to. With N sequences i,
token weights m_t (the mask, or the weights of supervised examples), losses l_t, and L_i the sum of m_t in sequence i:

    token_mean                    sum_i sum_t m_t l_t / sum_i L_i          (DAPO, arXiv:2503.14476)
    sequence_mean_token_mean      1/N sum_i (sum_t m_t l_t / L_i)          (GRPO, arXiv:2402.03300; GSPO, 2507.18071)
    sequence_mean_token_sum       1/N sum_i sum_t m_t l_t
    sequence_mean_token_sum_norm  1/N sum_i sum_t m_t l_t / C              (Dr. GRPO, arXiv:2503.20783)
    sum                           sum_i sum_t m_t l_t                      (Tinker)

A sequence is an example, or a rollout, however many datums its tokens are in. A sequence without tokens that count (L_i
= 0: cut by length, under `overlong_filter`) is not among the N. C is the most tokens that a sequence may have.
`sequence_mean` is another name of `sequence_mean_token_sum`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from trireme.core.batch import Numbers, TokenBatch

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
    """One of the ways to weigh the tokens of a substep in its loss (`trainer.loss_normalization`): changes token
    weights, and computes the divisor of the gradient. The module's docstring has the formulas."""

    kind: LossNormalization
    longest: int | None
    """C in the formulas of the module's docstring: the most tokens that a sequence may have; None if it is unknown."""

    def apply(self, batch: TokenBatch, column: str) -> tuple[TokenBatch, float]:
        """Returns (the minibatch `batch` with changed token weights, the number that the minibatch adds to the divisor
        of its substep). The float32 column `column` of `batch` holds the token weights m_t, which `weigh` changes."""
        return self.weigh(batch, column), self.divisor(_totals(batch, column))

    def weigh(self, batch: TokenBatch, column: str) -> TokenBatch:
        """Returns `batch` with the token weights m_t that this kind of normalisation needs. The float32 column `column`
        of `batch` holds the weights. For `sequence_mean_token_mean`, divides each weight by the L_i of its sequence;
        for all other kinds, changes nothing. All datums of a sequence must be in `batch`."""
        if self.kind != "sequence_mean_token_mean":
            return batch
        total_N = _totals(batch, column)
        share = batch.columns[column] / np.where(total_N == 0, 1.0, total_N)[_sequence_of_tokens(batch)]
        return replace(batch, columns={**batch.columns, column: share.astype(np.float32)})

    def divisor(self, total_N: npt.NDArray[np.float64]) -> float:
        """Returns the number that N sequences add to the divisor of their substep; 0 if this kind of normalisation
        divides by nothing. `total_N`: L_i of each sequence, the sum of its token weights."""
        number = float(np.count_nonzero(total_N))
        if self.kind == "token_mean":
            return float(total_N.sum())
        if self.kind == "sum":
            return 0.0
        if self.kind == "sequence_mean_token_sum_norm":
            assert self.longest is not None, "checked with the configuration"
            return number * self.longest
        return number


def _sequence_of_tokens(batch: TokenBatch) -> Numbers:
    return np.repeat(batch.sequences, batch.lengths)


def _totals(batch: TokenBatch, column: str) -> npt.NDArray[np.float64]:
    """Returns L_i of each sequence, the sum of its token weights in the column `column`: float64, indexed by the
    sequence's number in `batch.sequences`."""
    return np.bincount(_sequence_of_tokens(batch), batch.columns[column]).astype(np.float64, copy=False)
