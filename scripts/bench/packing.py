"""Measures how long it takes to distribute a large batch over 64 ranks, and how unequal their work is.

    python scripts/bench/packing.py [--repeats 9]

1,024 samples of 5.4 million tokens in all, with lognormal lengths up to 32,768; the same function that every shard
calls for each batch. What a sample costs grows with its tokens and with their square (attention). None dominates.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
from _common import Result, median

from trainer.batching import balance, compute_cost

SAMPLES, TOKENS, RANKS, LONGEST = 1024, 5_400_000, 64, 32_768
ATTENTION_LENGTH = 8192
TARGET_S, TARGET_IMBALANCE = 0.1, 0.0006
PUBLISHED_S = 8.4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    load_before = os.getloadavg()[0]
    seconds, imbalances = [], []
    for seed in range(repeats):
        drawn = np.random.default_rng(seed).lognormal(0.0, 0.8, SAMPLES)
        costs = compute_cost((drawn * TOKENS / drawn.sum()).astype(np.int64).clip(1, LONGEST), ATTENTION_LENGTH)
        started = time.perf_counter()
        datums_R = balance(costs, RANKS)
        seconds.append(time.perf_counter() - started)
        loads = [int(costs[datums].sum()) for datums in datums_R]
        imbalances.append(max(loads) / (sum(loads) / RANKS) - 1)
    Result(
        name="packing",
        value=median(seconds),
        unit="s",
        ratio=round(median(seconds) / PUBLISHED_S, 5),
        target=TARGET_S,
        holds=max(seconds) < TARGET_S and max(imbalances) < TARGET_IMBALANCE,
        against=f"a published packer, which takes {PUBLISHED_S} s",
        detail={
            "largest_s": round(max(seconds), 4),
            "imbalance_percent": [round(100 * imbalance, 4) for imbalance in imbalances],
            "target_imbalance_percent": 100 * TARGET_IMBALANCE,
            "load_before": round(load_before, 2),
        },
    ).print()


if __name__ == "__main__":
    main()
