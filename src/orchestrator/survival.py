"""Estimates how long rollouts last from those that ended, and from those that were stopped before their end.

A rollout that is stopped has lasted longer than it was seen to. Leaving it out would make long ones look rare, and
counting it as ended would make them look short. The product-limit estimator (Kaplan and Meier, 1958) does neither: a
stopped rollout counts among those that may end until it is stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

KEPT = 4096
"""Rollouts that are remembered: lengths change while a policy learns."""


class Survival:
    """Estimates the distribution of one positive quantity of rollouts, such as their seconds or their tokens."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, bool]] = deque(maxlen=KEPT)
        self._curve: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None = None

    def note(self, value: float, *, ended: bool) -> None:
        """Takes note of a rollout. `ended`: false if it was stopped, so that it would have had more."""
        self._seen.append((value, ended))
        self._curve = None

    @property
    def curve(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The values seen, ascending, and the estimated share of rollouts that have more than each: float64 [n]."""
        if self._curve is None:
            # Of equal values those that ended come first: one that was stopped there has more.
            seen = np.array(sorted(self._seen, key=lambda one: (one[0], not one[1])), np.float64).reshape(-1, 2)
            left = np.arange(len(seen), 0, -1)
            self._curve = seen[:, 0], np.cumprod(1 - seen[:, 1] / left)
        return self._curve

    def beyond(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Returns the share of rollouts that have more than each of `values`."""
        seen, share = self.curve
        return np.concatenate([[1.0], share])[np.searchsorted(seen, np.asarray(values, np.float64), side="right")]

    def state_dict(self) -> dict[str, Any]:
        """Returns the rollouts that it remembers as JSON values."""
        return {"values": [value for value, _ in self._seen], "ended": [ended for _, ended in self._seen]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remembers these rollouts in place of others."""
        self._seen = deque(zip(state["values"], state["ended"], strict=True), maxlen=KEPT)
        self._curve = None

    def mean(self) -> float:
        """Returns the estimated mean, up to the largest value seen; 0 before the first."""
        seen, share = self.curve
        return float(np.sum(np.diff(seen, prepend=0.0) * np.concatenate([[1.0], share])[:-1]))
