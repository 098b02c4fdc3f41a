"""Distinguishes an engine process that hangs from a busy one.

An engine reports nothing during a step. Some steps take a hundred times longer than all earlier ones: a long prefill, a
compilation, a KV cache that is computed again, a machine with other work. If the process is stopped or blocked, a step
never ends. CPU time tells the two apart, because a working process uses some and a hanging process uses none. There are
two deadlines. The one that is learned from the run counts only seconds without CPU time (`StallClock`). The configured
one counts all seconds.

An engine that waits for its GPU uses no CPU time either, so a GPU that computes counts as progress, even if the trainer
gave it the work. An engine that hangs while its GPU computes is ended by the configured deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil

LEAST_CPU_S = 0.01
LEAST_SHARE = 0.01
"""A process makes progress if it uses at least LEAST_CPU_S seconds of CPU time, and at least this share of the time
without progress: idle threads wake up now and then."""
QUIET_S = 1.0
"""Seconds. CPU time is not examined in a shorter silence."""
LONGEST_GAP_S = 2.0
"""Seconds. At most this much of the time between two looks counts, because this process or its machine may have been
stopped."""


class StallClock:
    """Counts the seconds in which at least one of several processes made no progress, judged by CPU time and GPU use.
    The processes answer together: if one stands still, the others wait for it, and keep using CPU time meanwhile. Call
    `look` about once a second.

    `cpu_s` returns the CPU seconds that each process has used so far. `computes` returns for each process True if its
    GPU has just computed. The argument `silent_s` of the methods: while a call to the processes is pending, the seconds
    since the call began; otherwise the seconds since the processes last answered.
    """

    def __init__(self, cpu_s: Callable[[], Sequence[float]], computes: Callable[[], Sequence[bool]]) -> None:
        self._cpu_s = cpu_s
        self._computes = computes
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
            works = [abs(used - before) >= least_s for used, before in pairs]  # less than before: a child ended
            if not all(works):
                works = [work or computes for work, computes in zip(works, self._computes(), strict=True)]
            if all(works):
                self._longest_s = max(self._longest_s, self._stalled_s - gap_s)  # in the last gap it did something
                self._used_s = used_s
                self._stalled_s = 0.0
                self._progressed = now
        return self._stalled_s

    def answered(self, silent_s: float) -> float:
        """Ends the silence, because the processes have answered. Returns the longest time without progress within the
        silence, in seconds. Time in which `look` was not called counts as time without progress."""
        longest_s = max(self._longest_s, min(silent_s, time.monotonic() - self._progressed))
        self._longest_s = self._stalled_s = 0.0
        return longest_s


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds that a process and all its descendants have used so far; 0 when it has ended. Includes
    the time spent waiting for a disk, if the kernel records that time."""
    used_s = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                used_s += sum(member.cpu_times())
    return used_s


def gpus_compute(count: int) -> list[bool]:
    """Returns, for each of the first `count` GPUs that this process sees, True if the GPU computed during the last
    measurement of NVIDIA's driver (a measurement covers up to a second), or if the driver cannot measure it. Works only
    with vLLM's build for CUDA."""
    from vllm.platforms import current_platform
    from vllm.third_party import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()
    try:
        return [_computes(nvml, current_platform.device_id_to_physical_device_id(number)) for number in range(count)]
    finally:
        nvml.nvmlShutdown()


def _computes(nvml: Any, gpu: int) -> bool:
    try:
        rates = nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByIndex(gpu))
    except nvml.NVMLError:  # parts of a GPU (MIG) have no such figure
        return True
    return bool(rates.gpu > 0)
