"""Measures what the requests of a process cost it."""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_S = 0.01
"""The most that one request is said to have cost: the process may have done other things since the one before."""


class CpuMeter:
    """Divides the CPU time of a process equally among the requests that it serves."""

    def __init__(self, cpu_s: Callable[[], float] = time.process_time) -> None:
        """`cpu_s` returns the CPU seconds that the process has used so far."""
        self._cpu_s = cpu_s
        self._requests, self._used_s = 0, cpu_s()

    def count(self) -> None:
        """Counts a request."""
        self._requests += 1

    def take(self) -> float:
        """Returns the CPU seconds since the last call for each of the requests that were counted since, MOST_S at
        most."""
        used_s, requests = self._cpu_s(), max(self._requests, 1)
        each = (used_s - self._used_s) / requests
        self._used_s, self._requests = used_s, 0
        return min(each, MOST_S)
