"""The plan: which datums a shard computes at once, and how its results find their way back.

A micro-batch is a rectangle of rows (one datum each, padded on the right to the longest), or packed: one row of datums
that do not see each other. It has at most `micro_batch_tokens` tokens, with padding, so that is a bound for memory and
nothing else: losses are sums over tokens. Every shard computes the same plan from the same lengths, takes its own part,
and runs as many micro-batches as the others, so that each collective is met by all; where a shard has fewer, fillers of
weight 0 stand in.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.core.types import TokenBatch

MICRO_BATCH_COST = 32
"""What a micro-batch costs beside its tokens (each layer is gathered, and its gradient summed): as much as computing so
many."""
GOOD_ENOUGH = 1e-4
"""By how much the rank with the most to do may exceed the mean before it is worth another round."""


@dataclass(frozen=True)
class MicroBatch:
    """Datums (by number) that are computed together. A `filler` repeats one with weight 0: no loss, no metrics."""

    datums: tuple[int, ...]
    filler: bool = False


def balance(costs: npt.NDArray[np.int64], num_ranks: int) -> list[list[int]]:
    """Datums of each rank, dearest first, such that the ranks' sums of `costs` (int64 [D]) are close. Deterministic.

    First each datum, dearest first, goes to the rank with the least (Graham 1969). Then, again and again, the rank with
    the most gives up one datum, or swaps one for another rank's, whichever leaves the larger of the two smallest; until
    the rank with the most is within GOOD_ENOUGH of the mean, or nothing helps.
    """
    order = np.argsort(-costs, kind="stable")
    rank_D = np.zeros(len(costs), np.int64)
    heap = [(0, rank) for rank in range(num_ranks)]
    for d in order:
        load, rank = heapq.heappop(heap)
        rank_D[d] = rank
        heapq.heappush(heap, (load + int(costs[d]), rank))
    _swap(costs, rank_D, num_ranks)
    return [[int(d) for d in order if rank_D[d] == rank] for rank in range(num_ranks)]


def _swap(costs: npt.NDArray[np.int64], rank_D: npt.NDArray[np.int64], num_ranks: int) -> None:
    """Improves `rank_D`, the rank of each datum, in place. Every round makes the largest load smaller, or leaves fewer
    ranks that have it, so it ends."""
    loads_R = np.bincount(rank_D, costs, num_ranks).astype(np.int64)
    nothing = np.arange(num_ranks)  # what a rank gives that only takes
    while loads_R.max() > loads_R.mean() * (1 + GOOD_ENOUGH):
        most = int(loads_R.argmax())
        own, others = np.flatnonzero(rank_D == most), np.flatnonzero(rank_D != most)
        partner = np.concatenate([rank_D[others], nothing])
        given = costs[own][:, None] - np.concatenate([costs[others], np.zeros(num_ranks, np.int64)])
        larger = np.maximum(loads_R[most] - given, loads_R[partner] + given)
        larger[:, partner == most] = loads_R[most]
        best = int(larger.argmin())
        if larger.flat[best] >= loads_R[most]:
            return
        mine, theirs = divmod(best, len(partner))
        rank_D[own[mine]] = partner[theirs]
        if theirs < len(others):
            rank_D[others[theirs]] = most
        loads_R[most] -= given[mine, theirs]
        loads_R[partner[theirs]] += given[mine, theirs]


def compute_cost(lengths: npt.NDArray[np.int64], attention_length: int) -> npt.NDArray[np.int64]:
    """Cost of computing each sequence, int64 [D], in arbitrary units: n tokens cost n (attention_length + n), where
    `attention_length` is that at which attention, which grows with n^2, costs as much as everything else."""
    return lengths * (attention_length + lengths)


def _cut(datums: Sequence[int], lengths_D: Sequence[int], micro_batch_tokens: int) -> list[MicroBatch]:
    """Cuts datums, longest first, into rectangles within the budget, such that the least is computed: tokens with
    padding, and MICRO_BATCH_COST for each rectangle. A datum longer than the budget is alone.

    `least[i]` is the cost of the first i datums, of which the last rectangle begins at `begin[i]`.
    """
    lengths = np.array([lengths_D[d] for d in datums], np.int64)
    least, begin = np.zeros(len(datums) + 1, np.int64), np.zeros(len(datums) + 1, np.int64)
    first = 0  # where the last rectangle may begin
    for i in range(1, len(datums) + 1):
        while first < i - 1 and (i - first) * lengths[first] > micro_batch_tokens:
            first += 1
        starts = np.arange(first, i)
        costs = least[first:i] + (i - starts) * lengths[first:i] + MICRO_BATCH_COST
        begin[i] = first + int(costs.argmin())
        least[i] = costs.min()
    micro_batches, end = [], len(datums)
    while end:
        micro_batches.append(MicroBatch(tuple(datums[int(begin[end]) : end])))
        end = int(begin[end])
    return micro_batches[::-1]


def _pack(datums: Sequence[int], lengths_D: Sequence[int], micro_batch_tokens: int) -> list[MicroBatch]:
    """Puts datums, longest first, each into the first row that has room for it (first-fit decreasing, Johnson 1973); a
    datum longer than the budget is alone."""
    rows: list[list[int]] = []
    room: list[int] = []
    for d in datums:
        fitting = next((row for row, left in enumerate(room) if left >= lengths_D[d]), None)
        if fitting is None:
            rows.append([d])
            room.append(micro_batch_tokens - lengths_D[d])
        else:
            rows[fitting].append(d)
            room[fitting] -= lengths_D[d]
    return [MicroBatch(tuple(row)) for row in rows]


def _count(datums: Sequence[int], micro_batch_size: int) -> list[MicroBatch]:
    """Cuts datums, longest first, into parts of `micro_batch_size`."""
    firsts = range(0, len(datums), micro_batch_size)
    return [MicroBatch(tuple(datums[first : first + micro_batch_size])) for first in firsts]


def plan(
    lengths: npt.NDArray[np.int64],
    num_ranks: int,
    micro_batch_tokens: int,
    attention_length: int,
    packed: bool = False,
    micro_batch_size: int | None = None,
) -> list[list[MicroBatch]]:
    """Micro-batches of each rank, [R][M] with the same M for all: every datum exactly once, not counting fillers.

    `lengths` int64 [D], D >= 1; `attention_length` as in `compute_cost`. With a `micro_batch_size` the number of datums
    is what is bounded, and not that of their tokens. Deterministic.
    """
    lengths_D = [int(n) for n in lengths]
    datums_R = balance(compute_cost(lengths, attention_length), num_ranks)
    if micro_batch_size:
        micro_R = [_count(datums, micro_batch_size) for datums in datums_R]
    else:
        cut = _pack if packed else _cut
        micro_R = [cut(datums, lengths_D, micro_batch_tokens) for datums in datums_R]
    most = max(len(micro_M) for micro_M in micro_R)
    filler = MicroBatch((int(np.argmin(lengths)),), filler=True)
    return [micro_M + [filler] * (most - len(micro_M)) for micro_M in micro_R]


@dataclass(frozen=True)
class Rows:
    """Where the tokens of some datums stand when each is a row of a rectangle, padded on the right: `index` int64
    [rows, longest] into the batch's tokens, `there` bool, False at the padding."""

    index: npt.NDArray[np.int64]
    there: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, offsets: npt.NDArray[np.int64], datums: Sequence[int]) -> Rows:
        chosen = np.asarray(datums, np.int64)
        starts, lengths = offsets[chosen], offsets[chosen + 1] - offsets[chosen]
        place = np.arange(lengths.max())
        there = place < lengths[:, None]
        return cls((starts[:, None] + place) * there, there)

    def pad(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A [T] column as [rows, longest], 0 at the padding."""
        return np.where(self.there, values[self.index], values.dtype.type(0))


@dataclass(frozen=True)
class Packed:
    """Where the tokens of some datums stand when they follow each other: `index` int64 [T] into the batch's tokens,
    `positions` int64 [T] within each, `datum` int64 [T] which of them it is, `starts` int32 [datums + 1]. `rows`: the
    same datums, out of the packed tokens, as rows."""

    index: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    datum: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int32]
    rows: Rows

    @classmethod
    def of(cls, offsets: npt.NDArray[np.int64], datums: Sequence[int]) -> Packed:
        chosen = np.asarray(datums, np.int64)
        lengths = offsets[chosen + 1] - offsets[chosen]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        index = np.repeat(offsets[chosen], lengths) + positions
        datum = np.repeat(np.arange(len(chosen)), lengths)
        return cls(index, positions, datum, starts.astype(np.int32), Rows.of(starts, range(len(chosen))))


@dataclass(frozen=True)
class ShardOutput:
    """What one shard computed: `datums` (numbers in the batch) and their `logprobs`, float32, one after the other.
    `suspects`: those of them whose loss is not finite, see `trainer.culprits`. `peak_s`: its part of that of
    `ForwardBackwardOutput`."""

    datums: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]
    metrics: Mapping[str, float]
    suspects: tuple[int, ...] = ()
    peak_s: float = 0.0


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
