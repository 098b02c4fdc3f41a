"""What every training loop needs around its verbs: the normaliser of a step, and where it stands."""

from __future__ import annotations

import time
from typing import Any

from trireme.config import CommonConfig
from trireme.core.types import LossNormalization


def loss_normalizer(kind: LossNormalization, loss_tokens: float, sequences: int) -> float:
    """What a substep's summed gradient is divided by; 1 where a substep has no loss tokens (its gradient is zero).

    `loss_tokens`: their number, or the sum of their weights.
    """
    divisors = {"token_mean": loss_tokens, "sequence_mean": sequences, "sum": 1}
    return float(divisors[kind] or 1)


def step_position(config: CommonConfig, step: int, attempt: int) -> dict[str, Any]:
    """Where the run stands after `step`."""
    done = (step + 1) / config.max_steps
    return {
        "step": step,
        "version": step + 1,
        "attempt": attempt,
        "progress": done,
        "progress/done_frac": done,
        "time/unix": time.time(),
    }
