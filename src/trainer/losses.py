"""Losses: sums over tokens with an explicit mask, and the monitors of how far trainer and sampler are apart.

A loss takes the trainer's log-probabilities `p` (float32, any shape), the batch's columns in the same shape, and its
parameters, and returns the raw sum (a scalar to call backward on; the normaliser comes in `optim_step`) and metrics
named `name:reduction`. With `q` the sampler's log-probabilities, `r = exp(p - q)`, `A` advantages and `m` the mask:

    importance_sampling    sum_t -m r A
    ppo                    sum_t -m min(r A, clamp(r, lo, hi) A)      (arXiv:1707.06347; thresholds are absolute ratios)

Where `m` is 0 the values of the other columns do not matter, be they NaN. Only tensor methods are used: importing this
module does not import torch, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from trireme.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

Metrics = dict[str, float]
LossFn = Callable[["Tensor", Mapping[str, "Tensor"], Mapping[str, float]], tuple["Tensor", Metrics]]

COLUMNS = ("target_tokens", "mask", "logprobs", "advantages")
"""What a batch must carry to be trained on."""


def _log_ratio(p: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """p - q where the mask is not 0, else 0 (never inf * 0)."""
    difference = p - columns["logprobs"]
    return difference.where(columns["mask"] != 0, difference.new_zeros(()))


def importance_sampling(
    p: Tensor, columns: Mapping[str, Tensor], config: Mapping[str, float]
) -> tuple[Tensor, Metrics]:
    """sum -m r A: the gradient of the expected advantage under the sampler, corrected by the ratio. No parameters."""
    ratio = _log_ratio(p, columns).exp()
    return -(columns["mask"] * ratio * columns["advantages"]).sum(), {"clipped:sum": 0.0}


def ppo(p: Tensor, columns: Mapping[str, Tensor], config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """sum -m min(r A, clamp(r, lo, hi) A); `clipped` counts the tokens whose gradient the clamp has cut off."""
    ratio = _log_ratio(p, columns).exp()
    unclipped = ratio * columns["advantages"]
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"]) * columns["advantages"]
    cut = ((clipped < unclipped) & (columns["mask"] != 0)).sum()
    return -(columns["mask"] * unclipped.minimum(clipped)).sum(), {"clipped:sum": float(cut)}


LOSS_FNS: dict[str, tuple[LossFn, dict[str, float]]] = {
    "importance_sampling": (importance_sampling, {}),
    "ppo": (ppo, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
}
"""Every loss by name, with its parameters and their defaults."""


def resolve_loss(name: str, config: Mapping[str, float]) -> tuple[LossFn, dict[str, float]]:
    """The loss `name` and its full parameters. Raises BadInput for an unknown name or key, or wrong thresholds."""
    if name not in LOSS_FNS:
        raise BadInput(f"unknown loss_fn {name!r}; known: {', '.join(LOSS_FNS)}")
    function, defaults = LOSS_FNS[name]
    unknown = sorted(set(config) - set(defaults))
    if unknown:
        known = ", ".join(f"{key} (default {value})" for key, value in defaults.items()) or "none"
        raise BadInput(f"loss_fn_config of {name} has unknown keys {', '.join(unknown)}; known: {known}")
    full = {**defaults, **config}
    low, high = full.get("clip_low_threshold", 0.0), full.get("clip_high_threshold", 1.0)
    if not 0 <= low <= high:
        raise BadInput(
            f"clip thresholds are absolute ratios with 0 <= low <= high, got clip_low_threshold = {low}, "
            f"clip_high_threshold = {high}; for a clip of 0.2 give 0.8 and 1.2"
        )
    return function, full


def monitors(p: Tensor, columns: Mapping[str, Tensor]) -> Metrics:
    """Sums over action tokens (m != 0), to be divided by `loss_tokens`: with d = q - p, `kl_sample_train_v1` is the
    mean of d, `kl_sample_train_v2` half the mean of d^2, `entropy` the mean of -q; `ratio` is the largest r."""
    p = p.detach()
    action = columns["mask"] != 0
    difference = -_log_ratio(p, columns)
    entropy = -columns["logprobs"].where(action, p.new_zeros(()))
    largest = (-difference).where(action, p.new_full((), float("-inf"))).max().exp()
    return {
        "loss_tokens:sum": float(action.sum()),
        "kl_sample_train_v1:sum": float(difference.sum()),
        "kl_sample_train_v2:sum": float(0.5 * difference.square().sum()),
        "entropy:sum": float(entropy.sum()),
        "ratio:max": float(largest),
    }
