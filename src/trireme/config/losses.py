"""The losses by name and their parameters: what a configuration is checked against and what the trainer computes with.

Their formulas are in `trainer.losses`. A loss of one's own is named by its import path, `package.module:function`; its
parameters are its own affair.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any

from trireme.config.refusals import Refusal, refuse

MASKING = {"mask_ratio_low": 0.0, "mask_ratio_high": inf}
RATIO = {"max_ratio": inf, **MASKING}
PARAMETERS: dict[str, dict[str, float | None]] = {
    "cross_entropy": {},
    "importance_sampling": {**RATIO},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, **RATIO},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0, **RATIO},
    "dro": {"beta": None, **MASKING},
    "gspo": {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004, **RATIO},
}
"""Parameters of each loss with their defaults; None: must be given. Thresholds are absolute ratios."""


def loss_parameters(name: str, given: Mapping[str, float]) -> dict[str, float]:
    """All parameters of the loss `name`: those given, and the defaults of the others. Raises BadInput."""
    refuse(list(loss_refusals(name, given)))
    defaults = {key: value for key, value in PARAMETERS.get(name, {}).items() if value is not None}
    return {**defaults, **given}


def loss_refusals(name: str, given: Mapping[str, float]) -> Iterator[Refusal]:
    """What is wrong with a loss and its parameters."""
    if ":" in name:
        yield from _import_problems(name)
        return
    if name not in PARAMETERS:
        yield Refusal(
            f"the loss {name}",
            f"one of {', '.join(PARAMETERS)}, or package.module:function",
            "correct --trainer.loss-fn",
        )
        return
    known = PARAMETERS[name]
    for key in sorted(set(given) - set(known)):
        yield Refusal(
            f"trainer.loss_fn_config.{key} with the loss {name}",
            f"parameters of {name}: {', '.join(known) or 'none'}",
            "leave it out, or choose another --trainer.loss-fn",
        )
    for key in (key for key, value in known.items() if value is None and key not in given):
        yield Refusal(
            f"the loss {name} without {key}",
            f"its parameter {key}, which has no default",
            f"add --trainer.loss-fn-config.{key.replace('_', '-')} VALUE",
        )
    yield from _range_problems({**known, **given})


def _range_problems(parameters: Mapping[str, float | None]) -> Iterator[Refusal]:
    """Thresholds must leave the ratio 1 alone, at which trainer and sampler agree."""
    for low_name, high_name in (("clip_low_threshold", "clip_high_threshold"), ("mask_ratio_low", "mask_ratio_high")):
        low, high = parameters.get(low_name) or 0.0, parameters.get(high_name, inf)
        if high is not None and not 0 <= low <= 1 <= high:
            yield Refusal(
                f"{low_name} = {low:g}, {high_name} = {high:g}",
                "absolute ratios with 0 <= low <= 1 <= high",
                "write 0.8 and 1.2 for what is elsewhere called a clip range of 0.2",
            )
    for key, least in (("max_ratio", 1.0), ("beta", 0.0)):
        value = parameters.get(key)
        if value is not None and not value >= least:
            yield Refusal(
                f"{key} = {value:g}", f"a number of at least {least:g}", f"correct trainer.loss_fn_config.{key}"
            )


def import_function(path: str) -> Callable[..., Any]:
    """What `package.module:function` names. Raises ImportError, AttributeError or TypeError."""
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{path} is a {type(function).__name__}, not a function")
    return function


def _import_problems(path: str) -> Iterator[Refusal]:
    try:
        import_function(path)
    except (ImportError, AttributeError, TypeError) as error:
        yield Refusal(
            f"the loss {path} ({error})",
            "package.module:function that this Python can import",
            "correct --trainer.loss-fn, or add the directory of the package to PYTHONPATH",
        )
