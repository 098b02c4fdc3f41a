"""The penalty for moving away from a reference policy, as an addition to the advantages.

Let q_t be the sampler's log-probability of token t, ref_t the reference's, and m_t 1 for action tokens (mask not 0) and
0 for others. Then d_t = (q_t - ref_t) m_t, and dbar is the mean of d_t over all action tokens of a substep. The
advantage A_t grows by coef m_t (dbar - d_t). The penalty is centred: it moves probability from tokens that are further
from the reference than usual to nearer tokens, and changes no average. With a discount g > 0 a token's added term also
sums the discounted terms of all later tokens in its datum: sum_k g^k (dbar - d_{t+k}) m_{t+k}, masked again. (After
Tinker's KL penalty; the published code leaks the discounted sum onto observed tokens.)

The trainer's shards compute the penalty, where the tokens are. This process sees two numbers for each datum, and adds
them up in the order of the datums, whichever shard computed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from trireme.core.batch import TokenBatch
from trireme.core.types import Minibatch
from trireme.run.rooms import Trainer

Floats = npt.NDArray[np.float64]
REFERENCE = "reference_logprobs"
"""Name of a column with the reference's log-probabilities."""


class KlPenalty:
    """Adds the KL penalty to the advantages of the minibatches of a step. If `coef` is 0, passes the minibatches on
    unchanged. For the metrics of the step, stores dbar of each substep: the mean, over the action tokens of the
    substep, of the sampler's log-probability minus the reference's.

    `update_every`: the policy's weights become the reference every `update_every` steps; 0: never.
    """

    def __init__(self, trainer: Trainer, coef: float, discount: float, update_every: int = 0) -> None:
        self._trainer = trainer
        self._coef = coef
        self._discount = discount
        self._update_every = update_every
        self._means: list[float] = []

    def __call__(self, minibatches: Iterator[Minibatch]) -> Iterator[Minibatch]:
        """Yields the minibatches of one substep with the penalty added. Computes the reference's log-probabilities of
        each minibatch as soon as the minibatch arrives. Yields no minibatch before the last has arrived, because the
        penalty contains dbar, a mean over all minibatches."""
        if not self._coef:
            yield from minibatches
            return
        all_ = []
        total = 0.0
        tokens = 0.0
        for minibatch in minibatches:
            batch, sums = self._trainer.forward_summarized(minibatch.batch, "reference", REFERENCE, sum_distances)
            all_.append(replace(minibatch, batch=batch))
            total += float(sums[0].sum())
            tokens += float(sums[1].sum())
        mean = total / max(tokens, 1)
        self._means.append(mean)
        penalized = partial(with_penalty, mean=mean, coef=self._coef, discount=self._discount)
        for minibatch in all_:
            yield replace(minibatch, batch=minibatch.batch.mapped(penalized))

    def end_step(self, version: int) -> None:
        """Records that the policy is now `version`. If `version` is a multiple of `update_every`, makes the policy the
        reference. A checkpoint of this version then has the new reference."""
        if self._update_every and version % self._update_every == 0:
            self._trainer.update_reference()

    def take(self) -> dict[str, float]:
        """Returns the metric `kl_policy_base`: the mean of dbar (see KlPenalty) over the substeps since the last call.
        Without a penalty returns no metric."""
        means = self._means
        self._means = []
        if means:
            return {"kl_policy_base": float(np.mean(means))}
        return {}


def sum_distances(batch: TokenBatch) -> Floats:
    """Returns for each datum the sum of d_t = q_t - ref_t over its action tokens (mask not 0), and the number of these
    tokens, float64 [2, D]. q_t is the sampler's log-probability of token t, from the column `logprobs` of the batch.
    ref_t is the reference's, from the column REFERENCE."""
    starts = batch.offsets[:-1]
    return np.stack([np.add.reduceat(_distances(batch), starts), np.add.reduceat(1.0 * _acts(batch), starts)])


def with_penalty(batch: TokenBatch, mean: float, coef: float, discount: float) -> TokenBatch:
    """Returns the batch with the penalty added to its advantages, and without the column REFERENCE. Let d_t be the
    sampler's log-probability of token t minus the reference's. The penalty adds coef (mean - d_t) to the advantage of
    each action token (mask not 0). With `discount` > 0 it also adds the discounted terms of the later action tokens of
    the datum. `mean`: dbar, the mean of d_t over all action tokens of the substep."""
    added = coef * _acts(batch) * (mean - _distances(batch))
    if discount:
        added = _acts(batch) * discounted_future_sum(added, batch.offsets, discount)
    columns = {name: column for name, column in batch.columns.items() if name != REFERENCE}
    return replace(batch, columns={**columns, "advantages": (columns["advantages"] + added).astype(np.float32)})


def _acts(batch: TokenBatch) -> npt.NDArray[np.bool_]:
    return batch.columns["mask"] != 0


def _distances(batch: TokenBatch) -> Floats:
    """Returns d_t for each token: the sampler's log-probability minus the reference's, float64 [T]; 0 where the mask is
    0."""
    sampled = batch.columns["logprobs"].astype(np.float64)
    return np.where(_acts(batch), sampled - batch.columns[REFERENCE], 0.0)


def discounted_future_sum(values: Floats, offsets: npt.NDArray[np.int64], discount: float) -> Floats:
    """Returns y [T] with y_t = x_t + discount y_{t+1} for `values` x [T], separately within each of D parts. `offsets`:
    int64 [D + 1], where the parts begin and end.

    >>> discounted_future_sum(np.array([1.0, 2.0, 3.0]), np.array([0, 3]), 0.5).tolist()
    [2.75, 3.5, 3.0]
    """
    sums = values.copy()
    for back in range(2, int(np.diff(offsets).max()) + 1):  # all datums side by side, from their ends
        at = offsets[1:][np.diff(offsets) >= back] - back
        sums[at] += discount * sums[at + 1]
    return sums
