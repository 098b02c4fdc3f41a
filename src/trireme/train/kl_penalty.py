"""The penalty for moving away from a reference policy, as an addition to the advantages.

With q the sampler's log-probability, ref the reference's, and m_t 1 for action tokens (whose mask is not 0) and 0 for
others: d_t = (q_t - ref_t) m_t, and dbar is its mean over all action tokens of a substep. A_t grows by coef m_t (dbar -
d_t). That is centred: the penalty moves probability from tokens that are further from the reference than usual to those
that are nearer, and changes no average. With a discount g > 0 the added term is that of the token and, discounted, of
all that follow in its datum: sum_k g^k (dbar - d_{t+k}) m_{t+k}, masked again. (After Tinker's KL penalty; the
published code leaks the discounted sum onto observed tokens.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trireme.core.types import Minibatch, TokenBatch
from trireme.train.steps import Trainer

Floats = npt.NDArray[np.float64]


class KlPenalty:
    """Adds the penalty to the minibatches of a step; without a `coef` it passes them on. Keeps dbar for the row.

    `update_every`: steps after which the reference becomes the policy; 0 = never.
    """

    def __init__(self, trainer: Trainer, coef: float, discount: float, update_every: int = 0) -> None:
        self._trainer, self._coef, self._discount, self._update_every = trainer, coef, discount, update_every
        self._means: list[float] = []

    def __call__(self, minibatches: Iterator[Minibatch]) -> Iterator[Minibatch]:
        """Yields the minibatches of one substep. The reference computes each as it comes; but no advantage is known
        before dbar is, so all wait for the last."""
        if not self._coef:
            yield from minibatches
            return
        all_ = [(minibatch, self._divergence(minibatch.batch)) for minibatch in minibatches]
        tokens = sum(np.count_nonzero(minibatch.batch.columns["mask"]) for minibatch, _ in all_)
        mean = sum(float(divergence.sum()) for _, divergence in all_) / max(tokens, 1)
        self._means.append(mean)
        for minibatch, divergence in all_:
            yield replace(minibatch, batch=self._penalized(minibatch.batch, mean - divergence))

    def _divergence(self, batch: TokenBatch) -> Floats:
        """d_t, float64 [T]."""
        reference = self._trainer.forward(batch, "reference").logprobs
        sampled = batch.columns["logprobs"].astype(np.float64)
        return np.where(batch.columns["mask"] != 0, sampled - reference, 0.0)

    def _penalized(self, batch: TokenBatch, centred: Floats) -> TokenBatch:
        """Adds to the advantages of a batch. `centred`: dbar - d_t, float64 [T]."""
        mask = batch.columns["mask"] != 0
        added = self._coef * mask * centred
        if self._discount:
            added = mask * discounted_future_sum(added, batch.offsets, self._discount)
        advantages = (batch.columns["advantages"] + added).astype(np.float32)
        return replace(batch, columns={**batch.columns, "advantages": advantages})

    def end_step(self, version: int) -> None:
        """Says that the policy has become `version`. At a multiple of `update_every` it becomes the reference, also of
        a commit taken now."""
        if self._update_every and version % self._update_every == 0:
            self._trainer.update_reference()

    def take(self) -> dict[str, float]:
        """Returns `kl_policy_base` of the step that is done: the mean of its substeps' dbar."""
        means, self._means = self._means, []
        return {"kl_policy_base": float(np.mean(means))} if means else {}


def discounted_future_sum(values: Floats, offsets: npt.NDArray[np.int64], discount: float) -> Floats:
    """y_t = x_t + discount y_{t+1} within each of the D parts that `offsets` int64 [D + 1] cuts `values` [T] into.

    >>> discounted_future_sum(np.array([1.0, 2.0, 3.0]), np.array([0, 3]), 0.5).tolist()
    [2.75, 3.5, 3.0]
    """
    sums = values.copy()
    for back in range(2, int(np.diff(offsets).max()) + 1):  # all datums side by side, from their ends
        at = offsets[1:][np.diff(offsets) >= back] - back
        sums[at] += discount * sums[at + 1]
    return sums
