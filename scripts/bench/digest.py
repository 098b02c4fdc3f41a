"""Measures how fast one core takes the digest of weights, and what its kernel costs the start of a process.

    python scripts/bench/digest.py [--repeats 9]

64 MiB of random bytes, a bucket. Seconds are those of the CPU, in one thread that stays on one core. Beside the kernel:
the same sums by torch's tensor operations, as a device computes them, and xxh3, which hashed published weights before.
Where a CPU has AVX-512, the kernel is also compiled for one that has AVX2 only, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import xxhash
from _common import Result, median

from trireme.core.digest import sums_of, warm_up
from trireme.transports import tensor_sums as by_torch

MIB = 64
TARGETS: dict[str, float] = {"AVX-512": 3.0, "AVX2": 1.0}
"""GB/s of one core."""
TORCH_MIB = 4
OLDER_CPU = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+bmi,+bmi2,+fma,+popcnt,+sse4.2"}


def vectors() -> str:
    """Returns the widest vectors with 64-bit multiplications that this CPU has."""
    flags = set(Path("/proc/cpuinfo").read_text().split("\nflags", 1)[-1].split("\n", 1)[0].split())
    return "AVX-512" if {"avx512f", "avx512dq"} <= flags else "AVX2" if "avx2" in flags else "neither"


def speeds(work: Callable[[], object], nbytes: int, repeats: int) -> list[float]:
    """Returns GB per CPU second of each call, after one that does not count."""
    work()
    found = []
    for _ in range(repeats):
        started = time.thread_time()
        work()
        found.append(nbytes / (time.thread_time() - started) / 1e9)
    return found


def kernel(repeats: int) -> dict[str, Any]:
    """Measures the kernel, and what it costs before it is first used."""
    started = time.process_time()
    import numba  # noqa: F401

    imported = time.process_time()
    warm_up()
    compiled = time.process_time()
    data = np.random.default_rng(0).integers(0, 256, MIB << 20, np.uint8)
    return {
        "import_cpu_s": round(imported - started, 3),
        "compile_cpu_s": round(compiled - imported, 3),
        "gb_per_s": [round(speed, 3) for speed in speeds(lambda: sums_of(data), data.nbytes, repeats)],
    }


def in_another_process(repeats: int, environ: dict[str, str]) -> dict[str, Any]:
    """Returns what `kernel` measures in a process that has imported nothing else of numba's."""
    command = [sys.executable, __file__, "--kernel", "--repeats", str(repeats)]
    run = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--kernel", action="store_true", help="measure the kernel alone, in this process")
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if options.kernel:
        print(json.dumps(kernel(options.repeats)))
        return
    load_before, has = os.getloadavg()[0], vectors()
    own = in_another_process(options.repeats, {})
    older = in_another_process(options.repeats, OLDER_CPU) if has == "AVX-512" else {}
    data = np.random.default_rng(0).integers(0, 256, MIB << 20, np.uint8)
    hashed = speeds(lambda: xxhash.xxh3_128_hexdigest(data.data), data.nbytes, options.repeats)
    torch.set_num_threads(1)
    words = torch.from_numpy(data[: TORCH_MIB << 20]).view(torch.bfloat16)
    with patch.object(by_torch, "_by_kernel", lambda _: False):
        summed = speeds(lambda: by_torch.tensor_sums(words), words.nbytes, min(3, options.repeats))
    value, target = median(own["gb_per_s"]), TARGETS.get(has)
    Result(
        name="digest",
        value=value,
        unit="GB/s of one core",
        ratio=round(value / median(hashed), 4),
        target=target,
        holds=None
        if target is None
        else value >= target and (not older or median(older["gb_per_s"]) >= TARGETS["AVX2"]),
        against="xxh3-128, which hashes whole tensors only",
        detail={
            "cpu_has": has,
            "kernel": own,
            "kernel_for_avx2": older,
            "xxh3_gb_per_s": [round(speed, 2) for speed in hashed],
            "torch_gb_per_s": [round(speed, 4) for speed in summed],
            "load_before": round(load_before, 2),
        },
    ).print()


if __name__ == "__main__":
    main()
