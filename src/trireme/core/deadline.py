"""Deadlines that are learned from the run: a silence is too long if it is many times the usual time."""

from __future__ import annotations

TAUGHT_BY = 10
"""The number of durations that must have been noted before a deadline differs from the configured one."""
TIMES_SLOWEST = 10.0
LEAST_S = 5.0


class LearnedDeadline:
    """A time limit for an operation that a run repeats. It is `configured_s` until TAUGHT_BY durations have been noted.
    Then it is ten times the longest duration so far, but at least 5 s and at most `configured_s`."""

    def __init__(self, configured_s: float) -> None:
        self.configured_s = configured_s
        self._count = 0
        self._slowest_s = 0.0

    def note(self, took_s: float) -> None:
        """Records the duration of one more repetition, in seconds."""
        self._count += 1
        self._slowest_s = max(self._slowest_s, took_s)

    @property
    def seconds(self) -> float:
        if self._count < TAUGHT_BY:
            return self.configured_s
        return min(self.configured_s, max(LEAST_S, TIMES_SLOWEST * self._slowest_s))
