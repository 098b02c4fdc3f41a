"""The plan: which datums a shard computes at once, and how its results find their way back.

A micro-batch is a rectangle of rows (one datum each, padded on the right to the longest) of at most
`micro_batch_tokens` tokens with padding, so it bounds memory and nothing else: losses are sums over tokens.
Every shard computes the same plan from the same lengths, takes its own part, and runs as many micro-batches as the
others, so that each collective is met by all; where a shard has fewer, fillers of weight 0 stand in.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trireme.types import TokenBatch

DEFAULT_MICRO_BATCH_TOKENS = 16384


@dataclass(frozen=True)
class MicroBatch:
    """Datums (by number) that are computed together. A `filler` repeats one with weight 0: no loss, no metrics."""

    datums: tuple[int, ...]
    filler: bool = False


def _deal(lengths_D: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Datums of each rank, longest first; each goes to the rank with the fewest tokens so far."""
    order = sorted(range(len(lengths_D)), key=lambda d: (-lengths_D[d], d))
    datums_R: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [(0, rank) for rank in range(num_ranks)]
    for d in order:
        tokens, rank = heapq.heappop(load)
        datums_R[rank].append(d)
        heapq.heappush(load, (tokens + lengths_D[d], rank))
    return datums_R


def _cut(datums: Sequence[int], lengths_D: Sequence[int], micro_batch_tokens: int) -> list[MicroBatch]:
    """Cuts datums, longest first, into rectangles within the budget; a datum longer than it is alone."""
    micro_batches: list[MicroBatch] = []
    rows: list[int] = []
    for d in datums:
        if rows and (len(rows) + 1) * lengths_D[rows[0]] > micro_batch_tokens:
            micro_batches.append(MicroBatch(tuple(rows)))
            rows = []
        rows.append(d)
    return [*micro_batches, MicroBatch(tuple(rows))] if rows else micro_batches


def plan(lengths: npt.NDArray[np.int64], num_ranks: int, micro_batch_tokens: int) -> list[list[MicroBatch]]:
    """Micro-batches of each rank, [R][M] with the same M for all: every datum exactly once, not counting fillers.

    `lengths` int64 [D], D >= 1. Deterministic.
    """
    lengths_D = [int(n) for n in lengths]
    micro_R = [_cut(datums, lengths_D, micro_batch_tokens) for datums in _deal(lengths_D, num_ranks)]
    most = max(len(micro_M) for micro_M in micro_R)
    filler = MicroBatch((int(np.argmin(lengths)),), filler=True)
    return [micro_M + [filler] * (most - len(micro_M)) for micro_M in micro_R]


def pad_rows(values: npt.NDArray, offsets: npt.NDArray[np.int64], datums: Sequence[int]) -> npt.NDArray:
    """Rows `datums` of a [T] column as [len(datums), longest], padded with 0 on the right."""
    rows = [values[offsets[d] : offsets[d + 1]] for d in datums]
    padded = np.zeros((len(rows), max(len(row) for row in rows)), dtype=values.dtype)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[: len(row)] = row
    return padded


@dataclass(frozen=True)
class ShardOutput:
    """What one shard computed: `datums` (numbers in the batch) and their `logprobs`, float32, one after the other."""

    datums: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]
    metrics: Mapping[str, float]


def scatter_outputs(batch: TokenBatch, outputs_R: list[ShardOutput]) -> npt.NDArray[np.float32]:
    """The logprobs of all shards in the order of the batch's tokens: float32 [T]."""
    logprobs = np.full(len(batch.tokens), np.nan, dtype=np.float32)
    for output in outputs_R:
        done = 0
        for d in output.datums:
            start, end = int(batch.offsets[d]), int(batch.offsets[d + 1])
            logprobs[start:end] = output.logprobs[done : done + end - start]
            done += end - start
    return logprobs
