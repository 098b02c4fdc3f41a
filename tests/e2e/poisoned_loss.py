"""A loss of one's own, by its import path: importance_sampling, not finite for the good answers of some versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.losses import Columns, Metrics, resolve_loss

if TYPE_CHECKING:
    from torch import Tensor

ONCE, ALWAYS_FROM = 2, 4
"""Versions: the first poisons a single step, the second all from there on."""


def loss(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    function, parameters = resolve_loss("importance_sampling", {})
    value, metrics = function(p, columns, parameters)
    version, good = columns["versions"], columns["advantages"] > 0
    poisoned = good & ((version == ONCE) | (version >= ALWAYS_FROM))
    return (value * float("nan") if bool(poisoned.any()) else value), metrics
