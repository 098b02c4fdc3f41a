"""Measures the present speed of the machine: a fixed calculation, repeated during a measurement.

It is a loop of Python and functions of a short array, which stays in a core's own cache. So other processes of the same
machine hardly change its CPU time, while a host that gives a virtual machine slower cores does. It has one thread.
"""

from __future__ import annotations

import statistics
import time
from threading import Event, Thread

import numpy as np
import numpy.typing as npt

EVERY_S = 1.0
LOOPS = 40_000
PASSES = 200


class Calculating:
    """Repeats the calculation in a thread, every n seconds, within a `with` block."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._stopped = Event()
        self._thread = Thread(target=self._repeat, daemon=True)
        self._took: list[tuple[float, float]] = []  # seconds since 1970, CPU milliseconds

    def __enter__(self) -> Calculating:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _repeat(self) -> None:
        values = np.linspace(0, 1, 4096, dtype=np.float32)
        calculate(values)
        while not self._stopped.wait(self._every_s):
            started = time.thread_time()
            calculate(values)
            self._took.append((time.time(), (time.thread_time() - started) * 1e3))

    def mean_ms(self, first: float = 0.0, last: float = np.inf) -> float:
        """Returns the mean CPU milliseconds of a calculation between two times, in seconds since 1970. Raises
        ValueError if there was none."""
        took = [duration for at, duration in self._took if first <= at <= last]
        if not took:
            raise ValueError(f"no calculation ended between {first} and {last}; one does every {self._every_s} s")
        return round(statistics.mean(took), 3)


def calculate(values: npt.NDArray[np.float32]) -> float:
    """Calculates for some milliseconds on one core."""
    total = 0.0
    for number in range(LOOPS):
        total += number * number % 7
    for _ in range(PASSES):
        total += float(np.exp(values).max())
    return total
