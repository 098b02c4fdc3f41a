"""A loss of one's own, by its import path: importance_sampling, which takes a second and more. So a run makes steps as
slowly as a large one does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.losses import Columns, Metrics, resolve_loss

if TYPE_CHECKING:
    from torch import Tensor

TAKES_S = 1.0


def loss(p: Tensor, columns: Columns, config: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    time.sleep(TAKES_S)
    function, parameters = resolve_loss("importance_sampling", {})
    return function(p, columns, parameters)
