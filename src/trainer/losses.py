"""Losses: sums over tokens with an explicit mask, and the monitors of how far trainer and sampler are apart.

A loss takes the trainer's log-probabilities `p` (float32, any shape whose last dimension is the tokens of one
sequence), the batch's columns in the same shape, and its parameters, and returns the raw sum (a scalar to call backward
on; the normaliser comes in `optim_step`) and metrics named `name:reduction`. With `q` the sampler's log-probabilities,
`r = exp(p - q)`, `A` advantages, `m` the mask, and sg() for what no gradient goes through:

    cross_entropy          sum_t -p weights
    importance_sampling    sum_t -m r A
    ppo                    sum_t -m min(r A, clamp(r, lo, hi) A)            (arXiv:1707.06347)
    cispo                  sum_t -m sg(clamp(r, lo, hi)) p A                (arXiv:2506.13585)
    dro                    sum_t -m (p A - beta/2 (p - q)^2)                (arXiv:2405.19107)
    gspo                   sum_t -m min(s A, clamp(s, lo, hi) A), s = exp(mean_t (p - q)) of the sequence
                                                                            (arXiv:2507.18071)
    module:function        one's own, with this signature

Thresholds are absolute ratios; columns `clip_low_threshold` and `clip_high_threshold` give them token by token.
gspo is a sum over tokens too: `loss_normalization` says how long and short sequences weigh.

Off-policy corrections, for every loss with a ratio. `max_ratio` c: r becomes r sg(min(1, c / r)), truncated importance
sampling (arXiv:1802.01561): its value is at most c, and the direction of the gradient stays. `mask_ratio_low`,
`mask_ratio_high`: tokens with a ratio outside count nothing.

Where `m` is 0 the values of the other columns do not matter, be they NaN. Only tensor methods are used: importing this
module does not import torch, so that a configuration can be checked without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trireme.config.losses import import_function, loss_parameters

if TYPE_CHECKING:
    from torch import Tensor

Columns = Mapping[str, "Tensor"]
Metrics = dict[str, float]
LossFn = Callable[["Tensor", Columns, Mapping[str, float]], tuple["Tensor", Metrics]]

COLUMNS = ("target_tokens", "mask", "logprobs", "advantages")
"""What a batch must carry to be trained on by any loss but cross_entropy."""
SUPERVISED_COLUMNS = ("target_tokens", "weights")


@dataclass(frozen=True)
class _Ratios:
    """What all ratio losses begin with. `mask` after masking by ratio; `log` = p - q, 0 where `mask` is; `ratio` after
    truncation; `metrics` say how many tokens were masked and truncated."""

    mask: Tensor
    log: Tensor
    ratio: Tensor
    metrics: Metrics


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


def _only(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is not 0, else 0 (never inf * 0)."""
    return values.where(mask != 0, values.new_zeros(()))


def _ratios(p: Tensor, columns: Columns, config: Mapping[str, float], per_sequence: bool = False) -> _Ratios:
    mask = columns["mask"]
    log = _only(p - columns["logprobs"], mask)
    low, high = _log(config["mask_ratio_low"]), _log(config["mask_ratio_high"])
    outside = (log.detach() < low) | (log.detach() > high)
    mask = mask.masked_fill(outside, 0.0)
    log = _only(log, mask)
    counted = mask != 0
    if per_sequence:
        log = _only((log.sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)).expand_as(log), mask)
    excess = (log.detach() - _log(config.get("max_ratio", math.inf))).clamp(min=0.0)
    metrics = {"ratio_masked_frac:sum": float(outside.sum()), "truncated_frac:sum": float((excess > 0).sum())}
    return _Ratios(mask, log, (log - excess).exp(), metrics)


def _clamp(ratio: Tensor, columns: Columns, config: Mapping[str, float]) -> Tensor:
    low, high = (
        columns.get(name, ratio.new_full((), config[name])) for name in ("clip_low_threshold", "clip_high_threshold")
    )
    return ratio.clamp(low, high)


def _clipped_sum(r: _Ratios, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """sum -m min(r A, clamp(r, lo, hi) A); `clip_frac` counts the tokens whose gradient the clamp has cut off."""
    advantages = _only(columns["advantages"], r.mask)
    unclipped, clipped = r.ratio * advantages, _clamp(r.ratio, columns, config) * advantages
    cut = ((clipped < unclipped) & (r.mask != 0)).sum()
    return -(r.mask * unclipped.minimum(clipped)).sum(), {"clip_frac:sum": float(cut), **r.metrics}


def cross_entropy(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """sum -p weights. No parameters. `loss_tokens` are those with a weight."""
    weights = columns["weights"]
    return -(_only(p, weights) * weights).sum(), {"loss_tokens:sum": float((weights != 0).sum())}


def importance_sampling(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """sum -m r A: the gradient of the expected advantage under the sampler, corrected by the ratio."""
    r = _ratios(p, columns, config)
    return -(r.mask * r.ratio * _only(columns["advantages"], r.mask)).sum(), r.metrics


def ppo(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """sum -m min(r A, clamp(r, lo, hi) A)."""
    return _clipped_sum(_ratios(p, columns, config), columns, config)


def gspo(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """ppo, in which all tokens of a sequence have its geometric mean ratio."""
    return _clipped_sum(_ratios(p, columns, config, per_sequence=True), columns, config)


def cispo(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """sum -m sg(clamp(r, lo, hi)) p A: no token loses its gradient, however far its ratio is off."""
    r = _ratios(p, columns, config)
    ratio = r.ratio.detach()
    weight = _clamp(ratio, columns, config)
    cut = ((weight != ratio) & (r.mask != 0)).sum()
    loss = -(r.mask * weight * _only(p, r.mask) * _only(columns["advantages"], r.mask)).sum()
    return loss, {"clip_frac:sum": float(cut), **r.metrics}


def dro(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """sum -m (p A - beta/2 (p - q)^2)."""
    r = _ratios(p, columns, config)
    gain = _only(p, r.mask) * _only(columns["advantages"], r.mask)
    return -(r.mask * (gain - config["beta"] / 2 * r.log.square())).sum(), r.metrics


LOSS_FNS: dict[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


def resolve_loss(name: str, config: Mapping[str, float]) -> tuple[LossFn, dict[str, float]]:
    """The loss `name` and its full parameters. Raises BadInput for an unknown name or key, or wrong thresholds."""
    parameters = loss_parameters(name, config)
    return (import_function(name) if ":" in name else LOSS_FNS[name]), parameters


def columns_of(name: str) -> tuple[str, ...]:
    """The columns that a batch must carry for the loss `name`."""
    return SUPERVISED_COLUMNS if name == "cross_entropy" else COLUMNS


def monitors(p: Tensor, columns: Columns) -> Metrics:
    """Sums over action tokens (m != 0), to be divided by `loss_tokens`: with d = q - p, `kl_sample_train_v1` is the
    mean of d, `kl_sample_train_v2` half the mean of d^2, `entropy` the mean of -q; `ratio` is the largest r."""
    mask = columns["mask"]
    action = mask != 0
    difference = _only(columns["logprobs"] - p.detach(), mask)
    largest = (-difference).where(action, p.new_full((), float("-inf"))).max().exp()
    return {
        "loss_tokens:sum": float(action.sum()),
        "kl_sample_train_v1:sum": float(difference.sum()),
        "kl_sample_train_v2:sum": float(0.5 * difference.square().sum()),
        "entropy:sum": float(_only(-columns["logprobs"], mask).sum()),
        "ratio:max": float(largest),
    }
