"""Losses: sums over tokens with an explicit mask, and monitors of the distance between trainer and sampler.

A loss takes the trainer's log-probabilities `p`, the batch's columns in the same shape, and its parameters. It returns
the raw sum (a scalar to call backward on; `optim_step` normalises) and metrics named `name:reduction`. `p` is float32
[T]: the tokens of all datums of a micro-batch, one datum after the other; the column DATUM has the number of each
token's datum. A user's own loss gets `p` and columns as padded rows [D, L] instead (`on_rows`), or those of one datum
as [L]. With `q` the sampler's log-probabilities, `r = exp(p - q)`, `A` advantages, `m` the mask, and sg() a stopped
gradient:

    cross_entropy          sum_t -p weights
    importance_sampling    sum_t -m r A
    ppo                    sum_t -m min(r A, clamp(r, lo, hi) A)            (arXiv:1707.06347)
    cispo                  sum_t -m sg(clamp(r, lo, hi)) p A                (arXiv:2506.13585)
    dro                    sum_t -m (p A - beta/2 (p - q)^2)                (arXiv:2405.19107)
    gspo                   sum_t -m min(s A, clamp(s, lo, hi) A), s = sg(exp(mean_t (p - q))) exp(p - sg(p)), the mean
                           over the sequence: GSPO-token                    (arXiv:2507.18071)
    module:function        a user's own loss with this signature, named by `trainer.loss_fn`

To add a loss, write a function here with a line above, register it with its columns and parameters in
`trireme.config.losses.LOSSES`, and name it in the docstrings of `trireme.config.trainer`, from which
`scripts/make_config_docs.py` generates its documentation. Thresholds are absolute ratios; the columns
`clip_low_threshold` and `clip_high_threshold` set them token by token. gspo is a sum over tokens too: how long and
short sequences weigh is in the mask (`trireme.core.normalization`). A datum is a sequence, unless the column
`sequence_log_ratio` says the mean over a sequence that is in several datums.

Off-policy corrections, for every loss with a ratio. `max_ratio` c: r becomes r sg(min(1, c / r)), truncated importance
sampling (arXiv:1802.01561): its value is at most c, and the direction of the gradient stays. Clipping is decided
before, on r itself. `mask_ratio_low`, `mask_ratio_high`: tokens with a ratio outside this range do not count.

Where `m` is 0 the other columns are ignored, even NaN, and so is `p`: it is 0 where it was not computed. A custom loss
(`surrogate`) is computed from log-probabilities where the batch is, not where the model is:

    forward --p--> f(data, p) = C --dC/dp--> forward_backward with cross_entropy, weights = -dC/dp

The gradient of sum_t -p_t w_t by any parameter equals the gradient of C, because w_t = -dC/dp_t is held constant. `f`
sees all datums together, so it may compare them; it costs one more forward pass. (Tinker's `forward_backward_custom`.)

Importing this module does not import torch: the driver and the configuration import it too.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trireme.config.losses import find_loss, loss_refusals
from trireme.core.batch import Numbers, TokenBatch
from trireme.core.datum import Datum
from trireme.core.refusals import refuse

if TYPE_CHECKING:
    from torch import Tensor

POLICY = "policy_logprobs"
"""Name of a column with the log-probabilities that the policy gave before the pass."""
DATUM = "datum"
"""Name of a column with the number of each token's datum in the micro-batch, int32 [T]. Without it all tokens are of
one datum."""
Columns = Mapping[str, "Tensor"]
UNREAD = ("target_tokens", "versions")
"""Columns that only a user's own loss may read."""
Metrics = dict[str, "float | Tensor"]
"""{name: value}. A tensor holds one number, on the device of the pass: to read it would wait for all earlier work."""
LossFn = Callable[["Tensor", Columns, Mapping[str, float]], tuple["Tensor", Metrics]]
CustomLoss = Callable[[Sequence[Datum], Sequence["Tensor"]], tuple["Tensor", Mapping[str, float]]]
"""Takes the datums and the log-probabilities of their targets (float32 [T] each); returns the loss and metrics."""


def _log(ratio: float) -> float:
    if ratio > 0:
        return math.log(ratio)
    return -math.inf


def _only(values: Tensor, mask: Tensor) -> Tensor:
    """Returns `values` where the mask is not 0, else 0 (never inf * 0)."""
    return values.where(mask != 0, values.new_zeros(()))


class _Ratios:
    """The ratios r = exp(p - q) from which all ratio losses start. For each token, p is the trainer's log-probability
    and q the sampler's.

    `mask` is the column `mask`, with 0 also where r is outside the range from `mask_ratio_low` to `mask_ratio_high`.
    `log` = p - q and `advantages` are 0 where `mask` is 0. The method `exp` computes ratios, truncated at `max_ratio`.
    `metrics` holds the number of tokens whose r is outside the range, and, once the method `exp` has been called, also
    the number of tokens whose ratio was truncated.
    """

    def __init__(self, p: Tensor, columns: Columns, config: Mapping[str, float]) -> None:
        log = _only(p - columns["logprobs"], columns["mask"])
        low = _log(config["mask_ratio_low"])
        high = _log(config["mask_ratio_high"])
        outside = (log.detach() < low) | (log.detach() > high)
        self.mask = columns["mask"].masked_fill(outside, 0.0)
        self.log = _only(log, self.mask)
        self.advantages = _only(columns["advantages"], self.mask)
        self.metrics: Metrics = {"ratio_masked_frac:sum": outside.sum()}
        self._limit = _log(config.get("max_ratio", math.inf))

    def exp(self, log: Tensor, counts: Tensor) -> Tensor:
        """Returns exp(log), truncated at `max_ratio`, where `counts` is true. Elsewhere returns 1 without a gradient,
        because the gradient of an overflowing exp is NaN even if nothing depends on it."""
        log = log.where(counts, log.new_zeros(()))
        excess = (log.detach() - self._limit).clamp(min=0.0)
        self.metrics["truncated_frac:sum"] = (excess > 0).sum()
        return (log - excess).exp()


def _thresholds(columns: Columns, config: Mapping[str, float], like: Tensor) -> tuple[Tensor, Tensor]:
    low, high = (
        columns.get(name, like.new_full((), config[name])) for name in ("clip_low_threshold", "clip_high_threshold")
    )
    return low, high


def cross_entropy(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """Returns the loss sum_t -p_t weights_t, and the metric `loss_tokens`, the number of tokens whose weight is not
    0."""
    weights = columns["weights"]
    return -(_only(p, weights) * weights).sum(), {"loss_tokens:sum": (weights != 0).sum()}


def importance_sampling(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """Returns the loss sum -m r A, and metrics. For each token, m is the mask, A the advantage, q the sampler's
    log-probability, and r = exp(p - q) the ratio. The gradient of the loss is the policy gradient on the sampler's
    tokens, corrected by the ratio."""
    r = _Ratios(p, columns, config)
    return -(r.mask * r.exp(r.log, r.advantages != 0) * r.advantages).sum(), r.metrics


def ppo(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """Returns the loss sum -m min(r A, clamp(r, lo, hi) A), and metrics. For each token, m is the mask, A the
    advantage, q the sampler's log-probability, and r = exp(p - q) the ratio. `clip_frac:sum` is the number of tokens
    that have no gradient because of the clamp; a step's metrics divide it by the number of loss tokens."""
    r = _Ratios(p, columns, config)
    return _clipped(r, r.log, columns, config)


def _clipped(r: _Ratios, log: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """Returns the loss sum -m min(x A, clamp(x, lo, hi) A) for ratios x = exp(log), and its metrics. For each token, m
    is the mask and A the advantage. A token is clipped, and then has no gradient, if x is above hi with A > 0, or below
    lo with A < 0. This is decided before `max_ratio` limits x. `clip_frac:sum` is the number of clipped tokens."""
    low, high = _thresholds(columns, config, log)
    up = r.advantages > 0
    down = r.advantages < 0
    cut = (up & (log.detach() > high.log())) | (down & (log.detach() < low.log()))
    ratio = r.exp(log, ~cut & (r.advantages != 0)).where(~cut, high.where(up, low))
    return -(r.mask * ratio * r.advantages).sum(), {"clip_frac:sum": cut.sum(), **r.metrics}


def gspo(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """Returns the loss of `ppo` with one ratio s for all tokens of a sequence, and its metrics. s is the geometric mean
    of the tokens' ratios. The gradient is that of GSPO-token, where s_t = sg(s) exp(p_t - sg(p_t)) and sg() stops the
    gradient. It equals GSPO's gradient if all tokens of a sequence have the same advantage."""
    r = _Ratios(p, columns, config)
    mean = columns.get("sequence_log_ratio")
    if mean is None:
        datum = columns.get(DATUM)
        if datum is None:
            datum = r.log.new_zeros(r.log.shape).int()
        mean = _means(r.log.detach(), r.mask != 0, datum)
    return _clipped(r, _only(mean + r.log - r.log.detach(), r.mask), columns, config)


def _means(values: Tensor, counts: Tensor, datum: Tensor) -> Tensor:
    """Returns for each token the mean of `values` over the counted tokens of its datum, float32 [T]; 0 if none is
    counted. `counts` bool [T]: the counted tokens; `values` [T] are 0 at all other tokens. `datum` int [T]: the number
    of each token's datum. Computes T sums, one for each datum that there could be, because the number of datums is
    known only on the device."""
    total = values.new_zeros(values.shape).double().index_add_(0, datum, values.double())
    count = values.new_zeros(values.shape).index_add_(0, datum, counts.to(values.dtype)).clamp_(min=1)
    return total.div_(count).to(values.dtype).index_select(0, datum)


def sum_log_ratios(batch: TokenBatch, config: Mapping[str, float]) -> npt.NDArray[np.float64]:
    """Returns two numbers for each datum, float64 [2, D]: the sum of p - q over its tokens whose mask is not 0, and the
    number of these tokens. p is the column POLICY of the batch, q its column `logprobs`. `config` has the range of
    ratios; tokens with a ratio outside this range do not count."""
    import torch

    columns = {name: torch.tensor(batch.columns[name]) for name in (POLICY, "logprobs", "mask", "advantages")}
    r = _Ratios(columns[POLICY], columns, config)
    sums = [np.add.reduceat(values.double().numpy(), batch.offsets[:-1]) for values in (r.log, r.mask != 0)]
    return np.stack(sums)


def mean_log_ratios(sequences: Numbers, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns for each sequence the mean of p - q over all its tokens whose mask is not 0, float64 [N]. `sequences`
    int64 [D]: the number of each datum's sequence; `sums` float64 [2, D]: from `sum_log_ratios`."""
    total_N, count_N = (np.bincount(sequences, row) for row in sums)
    return total_N / np.maximum(count_N, 1)


def with_sequence_ratios(batch: TokenBatch, mean_N: npt.NDArray[np.float64]) -> TokenBatch:
    """Returns the batch with the new column `sequence_log_ratio`, and without the column POLICY. The new column has for
    each token the mean of p - q of its sequence, from `mean_N`. The loss gspo needs this column if a sequence has
    several datums."""
    ratios = np.repeat(mean_N[batch.sequences].astype(np.float32), batch.lengths)
    columns = {name: column for name, column in batch.columns.items() if name != POLICY}
    return replace(batch, columns={**columns, "sequence_log_ratio": ratios})


def cispo(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """Returns the loss sum -m sg(clamp(r, lo, hi)) p A, and metrics. For each token, m is the mask, A the advantage, q
    the sampler's log-probability, and r = exp(p - q) the ratio; sg() stops the gradient. Every token keeps a gradient,
    whatever its ratio."""
    r = _Ratios(p, columns, config)
    low, high = _thresholds(columns, config, r.log)
    log = r.log.detach()
    clamped = log.clamp(low.log(), high.log())
    cut = ((clamped != log) & (r.mask != 0)).sum()
    gain = r.exp(clamped, r.advantages != 0) * _only(p, r.mask) * r.advantages
    return -(r.mask * gain).sum(), {"clip_frac:sum": cut, **r.metrics}


def dro(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """Returns the loss sum -m (p A - beta/2 (p - q)^2), and metrics. For each token, m is the mask, A the advantage,
    and q the sampler's log-probability."""
    r = _Ratios(p, columns, config)
    gain = _only(p, r.mask) * r.advantages
    return -(r.mask * (gain - config["beta"] / 2 * r.log.square())).sum(), r.metrics


def resolve_loss(name: str, config: Mapping[str, float]) -> tuple[LossFn, dict[str, float]]:
    """Returns the function of the loss `name`, and all its parameters: `config` and defaults for the rest. Raises
    BadInput for an unknown name or key, or a wrong value."""
    refuse(list(loss_refusals(name, config)))
    loss = find_loss(name)
    defaults = {key: p.default for key, p in loss.parameters.items() if p.default is not None}
    return pkgutil.resolve_name(loss.function), {**defaults, **config}


def on_rows(loss: LossFn, places: Tensor, shape: tuple[int, int]) -> LossFn:
    """Returns a loss that takes flat tokens [T] and calls `loss`, a loss of the user's, with padded rows of `shape`,
    [D, L]. `places` int64 [T]: where each token is in the flattened rows. The padding is 0 in all columns."""

    def pad(values: Tensor) -> Tensor:
        return values.new_zeros(shape[0] * shape[1]).index_copy(0, places, values).view(shape)

    def padded_loss(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
        return loss(pad(p), {name: pad(column) for name, column in columns.items() if name != DATUM}, config)

    return padded_loss


def any_counts(columns: Mapping[str, Any]) -> bool:
    """Returns True if any token of these columns has a mask or weight other than 0. The columns are in host memory."""
    return any(bool(columns[name].any()) for name in ("mask", "weights") if name in columns)


def counted_tokens(columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    """Returns for each token whether its mask or weight is not 0, bool [T]."""
    weights = [columns[name] != 0 for name in ("mask", "weights") if name in columns]
    return np.logical_or.reduce(weights)


def backward(
    loss: LossFn, p: Tensor, columns: Columns, config: Mapping[str, float], *, counts: bool
) -> tuple[Tensor, Metrics, Tensor]:
    """Computes a loss and its gradient with respect to `p`. Returns the loss's value, its metrics, and a bool tensor on
    the device that is true if value and gradient are finite. Does not wait for the device. The gradient is checked only
    if `p` retains it (a leaf, or after `retain_grad`).

    `counts` is False if no token counts: the mask or weight of every token is 0 (`any_counts`). Then value and gradient
    are 0, and `loss` is not called, because a user's loss may divide by the sum of the mask.
    """
    if not counts:
        p.backward(p.new_zeros(p.shape))
        nothing = p.new_zeros(())
        return nothing, {"loss_tokens:sum": 0.0}, nothing == 0
    value, metrics = loss(p, columns, config)
    value.backward()
    finite = value.detach().isfinite()
    return value.detach(), metrics, finite if p.grad is None else finite & p.grad.isfinite().all()


def read_metrics(parts: Sequence[Metrics]) -> list[dict[str, float]]:
    """Returns `parts` with all values as floats. Copies all tensors together, so it waits for the device only once."""
    import torch

    from trainer.transfers import to_host

    waiting = [value.detach().double() for part in parts for value in part.values() if isinstance(value, torch.Tensor)]
    numbers = iter(to_host(torch.stack(waiting)) if waiting else ())
    return [
        {name: float(next(numbers)) if isinstance(value, torch.Tensor) else value for name, value in part.items()}
        for part in parts
    ]


def surrogate(
    batch: TokenBatch, logprobs: npt.NDArray[np.float32], loss: CustomLoss
) -> tuple[TokenBatch, dict[str, float]]:
    """Converts a custom `loss`, which the shards cannot compute, into a batch that they can train on with the loss
    cross_entropy. On this batch, cross_entropy has the same gradient as `loss` has at `logprobs`, float32 [T]. Also
    returns the metrics of `loss`, with its value as `loss:sum`. Raises ValueError if the gradient is not finite."""
    import torch

    p_D = [torch.tensor(part, requires_grad=True) for part in np.split(logprobs, batch.offsets[1:-1].astype(int))]
    value, metrics = loss([batch.datum(d) for d in range(len(batch))], p_D)
    value.backward()
    weights_D = [np.zeros(len(p), np.float32) if p.grad is None else -p.grad.numpy() for p in p_D]
    for d, weights in enumerate(weights_D):
        if not np.isfinite(weights).all():
            raise ValueError(
                f"the gradient of the custom loss with respect to the log-probabilities of datum {d} is not finite"
            )
    columns = {"target_tokens": batch.columns["target_tokens"], "weights": np.concatenate(weights_D)}
    return replace(batch, columns=columns), {**metrics, "loss:sum": float(value.detach())}


def monitors(p: Tensor, columns: Columns) -> Metrics:
    """Returns metrics of the distance between trainer (`p`) and sampler (q, the column `logprobs`) over action tokens,
    whose mask is not 0. With d = q - p, `kl_sample_train_v1` is the sum of d, `kl_sample_train_v2` the sum of d^2 / 2,
    and `entropy` the sum of -q; divided by `loss_tokens`, the number of action tokens, they are means. `ratio` is the
    largest exp(p - q)."""
    mask = columns["mask"]
    action = mask != 0
    difference = _only(columns["logprobs"].double() - p.detach(), mask)
    largest = (-difference).where(action, p.new_full((), float("-inf"))).max().exp()
    return {
        "loss_tokens:sum": action.sum(),
        "kl_sample_train_v1:sum": difference.sum(),
        "kl_sample_train_v2:sum": 0.5 * difference.square().sum(),
        "entropy:sum": _only(-columns["logprobs"], mask).double().sum(),
        "ratio:max": largest,
    }
