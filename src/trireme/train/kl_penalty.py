"""The penalty for moving away from a reference policy, as an addition to the advantages.

With q the sampler's log-probability, ref the reference's, m the mask: d_t = (q_t - ref_t) m_t, and dbar is its mean
over all action tokens of a substep. A_t grows by coef m_t (dbar - d_t). That is centred: the penalty moves probability
from tokens that are further from the reference than usual to those that are nearer, and changes no average. With a
discount g > 0 the added term is that of the token and, discounted, of all that follow in its datum:
sum_k g^k (dbar - d_{t+k}) m_{t+k}, masked again. (After Tinker's KL penalty; the published code leaks the discounted
sum onto observed tokens.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trireme.core.types import ForwardBackwardOutput, Minibatch, TokenBatch, Which


class Referring(Protocol):
    """What is needed of the trainer."""

    def forward(self, data: TokenBatch, which: Which = "policy") -> ForwardBackwardOutput: ...

    def update_reference(self) -> None: ...


def divergence(batch: TokenBatch, reference: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """d_t = (q_t - ref_t) m_t, float32 [T], from the reference's log-probabilities float32 [T]."""
    mask = batch.columns["mask"]
    difference: npt.NDArray[np.float32] = np.where(mask != 0, (batch.columns["logprobs"] - reference) * mask, 0)
    return difference.astype(np.float32)


def mean_divergence(batches: Sequence[TokenBatch], divergences: Sequence[npt.NDArray[np.float32]]) -> float:
    """dbar: the mean over all action tokens of some batches; 0 where there are none."""
    tokens = sum(float(batch.columns["mask"].sum(dtype=np.float64)) for batch in batches)
    return sum(float(d.sum(dtype=np.float64)) for d in divergences) / max(tokens, 1.0)


def penalized(
    batch: TokenBatch, divergence: npt.NDArray[np.float32], mean: float, coef: float, discount: float
) -> TokenBatch:
    """The batch with the penalty in its advantages."""
    mask = batch.columns["mask"]
    added = coef * mask * (np.float32(mean) - divergence)
    if discount:
        added = mask * discounted_future_sum(added, batch.offsets, discount)
    advantages = (batch.columns["advantages"] + added).astype(np.float32)
    return replace(batch, columns={**batch.columns, "advantages": advantages})


def discounted_future_sum(
    values: npt.NDArray[np.float32], offsets: npt.NDArray[np.int64], discount: float
) -> npt.NDArray[np.float32]:
    """y_t = x_t + discount y_{t+1} within each of the D parts that `offsets` int64 [D + 1] cuts `values` [T] into.

    >>> discounted_future_sum(np.array([1, 2, 3], np.float32), np.array([0, 3]), 0.5).tolist()
    [2.75, 3.5, 3.0]
    """
    sums = values.astype(np.float64)
    for back in range(2, int(np.diff(offsets).max()) + 1):  # all datums at once, from their ends
        at = offsets[1:][np.diff(offsets) >= back] - back
        sums[at] += discount * sums[at + 1]
    return sums.astype(np.float32)


class KlPenalty:
    """Adds the penalty to the minibatches of a step; without a `coef` it passes them on. Keeps dbar for the row.

    `update_every`: steps after which the reference becomes the policy; 0 = never.
    """

    def __init__(self, trainer: Referring, coef: float, discount: float, update_every: int = 0) -> None:
        self._trainer, self._coef, self._discount, self._update_every = trainer, coef, discount, update_every
        self._means: list[float] = []

    def __call__(self, minibatches: Iterator[Minibatch]) -> Iterator[Minibatch]:
        """The minibatches of one substep. The reference looks at each as it comes; but no advantage is known before
        dbar is, so all wait for the last."""
        if not self._coef:
            yield from minibatches
            return
        all_, divergences = [], []
        for minibatch in minibatches:
            reference = self._trainer.forward(minibatch.batch, "reference").logprobs
            all_.append(minibatch)
            divergences.append(divergence(minibatch.batch, reference))
        mean = mean_divergence([minibatch.batch for minibatch in all_], divergences)
        self._means.append(mean)
        for minibatch, d in zip(all_, divergences, strict=True):
            yield replace(minibatch, batch=penalized(minibatch.batch, d, mean, self._coef, self._discount))

    def end_step(self, version: int) -> None:
        """The policy has become `version`. At a multiple of `update_every` it is the reference from here on: also that
        of a commit taken now."""
        if self._update_every and version % self._update_every == 0:
            self._trainer.update_reference()

    def take(self) -> dict[str, float]:
        """`kl_policy_base` of the step that is done: the mean of its substeps' dbar."""
        means, self._means = self._means, []
        return {"kl_policy_base": float(np.mean(means))} if means else {}
