"""Distinguishes an engine process that hangs from a busy one.

An engine says nothing in the middle of a step. A long prefill, a compilation, a KV cache that is computed again or a
machine with other work make a step a hundred times longer than all before; a stopped or blocked process makes it
endless. CPU time distinguishes them: a working process uses some, however little it gets, and a hanging process uses
none. So a deadline that is learned from the run counts the time without any (`StallClock`), and the configured one
counts all time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

LEAST_CPU_S = 0.01
LEAST_SHARE = 0.01
"""Using less CPU time than this, and than this share of the time, is no progress: idle threads wake up now and then."""
QUIET_S = 1.0
"""A shorter silence is not looked into."""
LONGEST_GAP_S = 2.0
"""The most that counts of the time between two looks: this process, or its machine, may have been stopped itself."""


class StallClock:
    """Counts the seconds in which at least one of several processes made no progress, by their CPU time. The processes
    answer together: one that stands still holds up the others, which keep using CPU time while they wait. Call
    `look` about once a second.

    `cpu_s` returns the CPU seconds that each process has used so far. The argument `silent_s` is always the time in
    seconds since they last answered, or were asked.
    """

    def __init__(self, cpu_s: Callable[[], Sequence[float]]) -> None:
        self._cpu_s = cpu_s
        self._used_s: Sequence[float] = ()
        self._stalled_s = self._longest_s = 0.0
        self._looked = self._progressed = time.monotonic()

    def look(self, silent_s: float) -> float:
        """Returns for how many seconds, until now, some process has made no progress; at most `silent_s`."""
        now = time.monotonic()
        gap_s = now - self._looked
        self._looked = now
        self._stalled_s = min(self._stalled_s + min(gap_s, LONGEST_GAP_S), silent_s)
        if self._stalled_s >= QUIET_S:
            used_s = self._cpu_s()
            least_s = max(LEAST_CPU_S, LEAST_SHARE * self._stalled_s)
            pairs = zip(used_s, self._used_s or [0.0] * len(used_s), strict=True)
            if all(abs(used - before) >= least_s for used, before in pairs):  # less than before: a child ended
                self._longest_s = max(self._longest_s, self._stalled_s - gap_s)  # in the last gap it did something
                self._used_s = used_s
                self._stalled_s = 0.0
                self._progressed = now
        return self._stalled_s

    def answered(self, silent_s: float) -> float:
        """Ends the silence, because the processes have answered. Returns the longest time without progress in it, in
        seconds. Time in which `look` was not called counts as time without progress."""
        longest_s = max(self._longest_s, min(silent_s, time.monotonic() - self._progressed))
        self._longest_s = self._stalled_s = 0.0
        return longest_s


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds that a process and all its descendants have used so far; 0 when it has ended. Waits for a
    disk count too, where the kernel counts them."""
    used_s = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                used_s += sum(member.cpu_times())
    return used_s
