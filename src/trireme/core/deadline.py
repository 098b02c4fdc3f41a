"""Deadlines that are learned from the run: silence is noticed in proportion to the usual times."""

from __future__ import annotations

TAUGHT_BY = 10
"""How many must have been seen before a deadline differs from the configured one."""
TIMES_SLOWEST = 10.0
LEAST_S = 5.0


class LearnedDeadline:
    """Limits how long something may take that a run does again and again: ten times as long as the slowest so far, at
    least 5 s and at most `configured_s`. Until ten have been seen it is `configured_s`."""

    def __init__(self, configured_s: float) -> None:
        self.configured_s = configured_s
        self._count = 0
        self._slowest_s = 0.0

    def note(self, took_s: float) -> None:
        """Learns from one more interval of n seconds."""
        self._count += 1
        self._slowest_s = max(self._slowest_s, took_s)

    @property
    def seconds(self) -> float:
        if self._count < TAUGHT_BY:
            return self.configured_s
        return min(self.configured_s, max(LEAST_S, TIMES_SLOWEST * self._slowest_s))
