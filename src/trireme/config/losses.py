"""The registry of losses: where each is implemented, which columns it reads and which parameters it takes.

`trainer.losses` says how to add one. A user's own loss is named by its import path, `package.module:function`; it
reads the columns of rollouts, and its parameters are not checked.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from math import inf
from typing import NamedTuple

from trireme.core.normalization import LossNormalization
from trireme.core.refusals import Refusal

ROLLOUT_COLUMNS = ("target_tokens", "mask", "logprobs", "advantages")
SUPERVISED_COLUMNS = ("target_tokens", "weights")


class Parameter(NamedTuple):
    """A parameter of a loss. If the names of two parameters differ only in `low` and `high`, the two are the bounds of
    a probability ratio. They bound the ratio itself (low <= 1 <= high), not its distance from 1."""

    default: float | None = None
    """None: must be given."""
    least: float | None = None
    """Smallest value that is allowed."""


class Loss(NamedTuple):
    """A loss, as configuration and trainer know it: its function, parameters and columns."""

    function: str
    """Import path, `module:function`."""
    parameters: Mapping[str, Parameter]
    columns: tuple[str, ...] = ROLLOUT_COLUMNS
    """Columns that a batch must have."""
    normalization: LossNormalization = "token_mean"
    """`trainer.loss_normalization` unless it is given."""
    per_sequence: bool = False
    """True: a token's loss depends on the ratios of all tokens of its sequence."""


def _clip(low: float, high: float) -> dict[str, Parameter]:
    return {"clip_low_threshold": Parameter(low), "clip_high_threshold": Parameter(high)}


_MASKING = {"mask_ratio_low": Parameter(0.0), "mask_ratio_high": Parameter(inf)}
_RATIO = {"max_ratio": Parameter(inf, least=1.0), **_MASKING}
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss("trainer.losses:cross_entropy", {}, SUPERVISED_COLUMNS),
    "importance_sampling": Loss("trainer.losses:importance_sampling", _RATIO),
    "ppo": Loss("trainer.losses:ppo", {**_clip(0.8, 1.2), **_RATIO}),
    "cispo": Loss("trainer.losses:cispo", {**_clip(0.0, 4.0), **_RATIO}),
    "dro": Loss("trainer.losses:dro", {"beta": Parameter(least=0.0), **_MASKING}),
    "gspo": Loss(
        "trainer.losses:gspo",
        {**_clip(0.9997, 1.0004), **_RATIO},
        normalization="sequence_mean_token_mean",
        per_sequence=True,
    ),
}
_OF_GROUPS = "give --trainer.loss-fn ppo with --orchestrator.advantage"
METHODS = {
    "grpo": f"{_OF_GROUPS} std, which is GRPO",
    "dr_grpo": f"{_OF_GROUPS} mean and --trainer.loss-normalization sequence_mean_token_sum_norm, which is Dr. GRPO",
    "dapo": f"{_OF_GROUPS} std, --trainer.loss-fn-config.clip-high-threshold 1.28, --orchestrator.overlong-filter and "
    "--orchestrator.remove-constant-reward-groups",
    "rloo": "give --trainer.loss-fn importance_sampling with --orchestrator.advantage leave_one_out, which is RLOO",
    "reinforce": "give --trainer.loss-fn importance_sampling",
    "sft": "use the command sft, which trains on answers that are given",
}
"""Methods with the name of a loss elsewhere: a loss with advantages of groups. Here each part is a key of its own."""


def find_loss(name: str) -> Loss:
    """Returns the built-in loss `name`. Any other `name` is taken as the import path of the user's own loss."""
    return LOSSES.get(name) or Loss(name, {})


def loss_refusals(name: str, options: Mapping[str, float]) -> Iterator[Refusal]:
    """Yields refusals of an unknown loss `name`, and of unknown, missing or wrong parameters in `options`."""
    if ":" in name:
        yield from _import_refusals(name)
        return
    if name not in LOSSES:
        yield Refusal(
            f"the loss {name}",
            f"one of {', '.join(LOSSES)}, or package.module:function",
            METHODS.get(name.lower().replace("-", "_"), "correct --trainer.loss-fn"),
        )
        return
    parameters = LOSSES[name].parameters
    for key in sorted(set(options) - set(parameters)):
        yield Refusal(
            f"trainer.loss_fn_config.{key} with the loss {name}",
            f"parameters of {name}: {', '.join(parameters) or 'none'}",
            "leave it out, or choose another --trainer.loss-fn",
        )
    values = {key: options.get(key, parameter.default) for key, parameter in parameters.items()}
    for key in (key for key, value in values.items() if value is None):
        yield Refusal(
            f"the loss {name} without {key}",
            f"its parameter {key}, which has no default",
            f"add --trainer.loss-fn-config.{key.replace('_', '-')} VALUE",
        )
    yield from _range_refusals(parameters, {key: value for key, value in values.items() if value is not None})


def _range_refusals(parameters: Mapping[str, Parameter], values: Mapping[str, float]) -> Iterator[Refusal]:
    """Yields refusals of thresholds that do not enclose the ratio 1 (where trainer and sampler agree), and of values
    below a parameter's smallest value."""
    for low, high in ((name, name.replace("low", "high")) for name in parameters if "low" in name):
        if not 0 <= values[low] <= 1 <= values[high]:
            yield Refusal(
                f"{low} = {values[low]:g}, {high} = {values[high]:g}",
                "absolute ratios with 0 <= low <= 1 <= high",
                "write 0.8 and 1.2 for what is elsewhere called a clip range of 0.2",
            )
    for key, (_, least) in parameters.items():
        if least is not None and key in values and not values[key] >= least:
            yield Refusal(
                f"{key} = {values[key]:g}", f"a number of at least {least:g}", f"correct trainer.loss_fn_config.{key}"
            )


def _import_refusals(path: str) -> Iterator[Refusal]:
    try:
        function = pkgutil.resolve_name(path)
        if callable(function):
            return
        problem = f"{path} is a {type(function).__name__}, not a function"
    except (ImportError, AttributeError, ValueError) as error:
        problem = str(error)
    yield Refusal(
        f"the loss {path} ({problem})",
        "package.module:function that this Python can import",
        "correct --trainer.loss-fn, or add the directory of the package to PYTHONPATH",
    )
