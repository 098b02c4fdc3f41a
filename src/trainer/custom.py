"""A loss on log-probabilities that is computed where the batch is, not where the model is.

    forward --p--> f(data, p) = C --dC/dp--> forward_backward with cross_entropy, weights = -dC/dp

The gradient of sum_t -p_t w_t by any parameter is that of C, because w_t = -dC/dp_t is held constant. `f` sees all
datums at once, so that it may compare them; it costs one more forward pass. (Tinker's `forward_backward_custom`.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trireme.core.types import Datum, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

CustomLoss = Callable[[Sequence[Datum], Sequence["Tensor"]], tuple["Tensor", Mapping[str, float]]]
"""From the datums and the log-probabilities of their targets (float32 [T] each) to the loss and metrics."""


def surrogate(
    batch: TokenBatch, logprobs: npt.NDArray[np.float32], loss: CustomLoss
) -> tuple[TokenBatch, dict[str, float]]:
    """The batch for cross_entropy whose gradient is that of `loss` at `logprobs` float32 [T]; and the metrics: those
    that `loss` gives, and its value as `loss:sum`. Raises ValueError when the gradient is not finite."""
    import torch

    p_D = [
        torch.from_numpy(part.copy()).requires_grad_() for part in np.split(logprobs, batch.offsets[1:-1].astype(int))
    ]
    value, metrics = loss([batch.datum(d) for d in range(len(batch))], p_D)
    value.backward()
    weights_D = [np.zeros(len(p), np.float32) if p.grad is None else -p.grad.numpy() for p in p_D]
    for d, weights in enumerate(weights_D):
        if not np.isfinite(weights).all():
            raise ValueError(f"the gradient of the custom loss by the log-probabilities of datum {d} is not finite")
    columns = {"target_tokens": batch.columns["target_tokens"], "weights": np.concatenate(weights_D)}
    return replace(batch, columns=columns), {**metrics, "loss:sum": float(value.detach())}
