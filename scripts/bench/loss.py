"""The loss of many short sequences over that of few long ones: the same 32,768 tokens, forward and backward.

    python scripts/bench/loss.py [--repeats 30]

512 sequences of 64 tokens against 8 of 4,096, one thread. Timed is all that happens between the model's
log-probabilities and their gradient: columns into rows, loss (ppo), monitors, backward. Both shapes in turn.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import torch
from _common import Result, median

from trainer.batching import Rows
from trainer.losses import monitors, resolve_loss
from trireme.core.types import TokenBatch

TOKENS, SHAPES = 32_768, (512, 8)
TARGET = 1.3
PUBLISHED = 40


def make_batch(sequences: int) -> TokenBatch:
    rng = np.random.default_rng(0)
    columns = {
        "mask": np.ones(TOKENS, np.float32),
        "logprobs": -rng.random(TOKENS, np.float32),
        "advantages": rng.normal(size=TOKENS).astype(np.float32),
    }
    offsets = np.arange(sequences + 1) * (TOKENS // sequences)
    return TokenBatch(np.zeros(TOKENS, np.int32), offsets, columns, np.ones(sequences, np.float32))


def seconds_of(batch: TokenBatch) -> float:
    function, config = resolve_loss("ppo", {})
    p = torch.full((len(batch), TOKENS // len(batch)), -0.5, requires_grad=True)
    started = time.perf_counter()
    layout = Rows(batch.offsets, range(len(batch)))
    rows = {name: torch.from_numpy(layout.pad(column)) for name, column in batch.columns.items()}
    loss, _ = function(p, rows, config)
    monitors(p, rows)
    loss.backward()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    batches = {sequences: make_batch(sequences) for sequences in SHAPES}
    measured: dict[int, list[float]] = {sequences: [] for sequences in SHAPES}
    for repeat in range(repeats + 3):
        for sequences, batch in batches.items():
            seconds = seconds_of(batch)
            if repeat >= 3:  # the first ones warm up
                measured[sequences].append(seconds * 1000)
    many, few = (median(measured[sequences]) for sequences in SHAPES)
    Result(
        name="loss",
        value=many,
        unit=f"ms for {SHAPES[0]} sequences",
        ratio=round(many / few, 3),
        target=TARGET,
        holds=many / few <= TARGET,
        against=f"{SHAPES[1]} sequences of the same {TOKENS} tokens: {few} ms (a published trainer: {PUBLISHED} times)",
        detail={"load_before": round(load_before, 2)},
    ).print()


if __name__ == "__main__":
    main()
