"""The learning rate: a default by model, its scaling with the batch, and its course over the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from trireme.config import CommonConfig
from trireme.core.errors import BadInput

_EXPONENTS = {"llama": 0.781, "qwen": 0.0775}


def get_lr(model: str, hidden_size: int, lora: bool = False) -> float:
    """Returns 5e-5 * (10 with LoRA) * (2000 / hidden_size) ^ P, Tinker's rule with a P for each family of models.

    `model` is a model's name or its `model_type`, which contains the name of the family. Raises BadInput for families
    without a fitted P.

    >>> get_lr("meta-llama/Llama-3.1-8B", 4096, lora=True)
    0.0002856415043086949
    """
    for family, exponent in _EXPONENTS.items():
        if family in model.lower():
            return 5e-5 * (10.0 if lora else 1.0) * (2000 / hidden_size) ** exponent
    raise BadInput(
        f'learning_rate = "auto" knows Qwen and Llama models, got {model!r}; give a number, such as '
        "--trainer.learning-rate 1e-5"
    )


def scale_lr(learning_rate: float, batch_size: int, reference_batch_size: int) -> float:
    """Returns `learning_rate`, which suits `reference_batch_size`, times sqrt(batch_size / reference_batch_size)."""
    return learning_rate * math.sqrt(batch_size / reference_batch_size)


def lr_at(
    step: int, peak: float, schedule: Literal["constant", "linear", "cosine"], warmup_steps: int, max_steps: int
) -> float:
    """Returns the learning rate of step `step` (from 0). It rises linearly to `peak` over `warmup_steps` (step 0 has
    peak / warmup_steps). Then it stays, if `schedule` is constant, or falls to 0 at `max_steps`, linearly or as a
    cosine."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    share = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[schedule]
    return peak * share


def learning_rate_schedule(config: CommonConfig, model_type: str, hidden_size: int) -> Callable[[int], float]:
    """Returns the learning rate of a run as a function of the step (from 0). If `trainer.learning_rate` is "auto", it
    depends on the model's type and hidden size (`get_lr`)."""
    options = config.trainer
    rate = options.learning_rate
    if rate == "auto":
        peak = get_lr(model_type, hidden_size, options.lora.on)
    else:
        peak = rate
    return lambda step: lr_at(step, peak, options.schedule, options.warmup_steps, config.max_steps)
