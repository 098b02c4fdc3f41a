"""The plan: which datums a shard computes together, and how its results return to the order of the batch.

A micro-batch is a rectangle of rows (one datum each, padded on the right to the longest), or packed: one row of datums
that do not see each other. It has at most `micro_batch_tokens` tokens, with padding. This bounds memory and changes
nothing else, because losses are sums over tokens. Every rank computes the same plan from the same lengths and takes its
own part; other rooms get the first half of the plan, which says which datums each rank computes. All ranks run the same
number of micro-batches, so that all take part in each collective; a rank with fewer runs fillers of weight 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trireme.core.batch import Batch, BatchPart, Numbers

if TYPE_CHECKING:
    from torch import Tensor

MICRO_BATCH_COST = 32
"""Fixed cost of a micro-batch (gathering each layer, reducing its gradient), in tokens computed."""
GOOD_ENOUGH = 1e-4
"""Share by which the highest cost of a rank may exceed the mean."""


@dataclass(frozen=True)
class MicroBatch:
    """The datums that a shard computes together in one pass."""

    datums: tuple[int, ...]
    """Their numbers in the batch."""
    filler: bool = False
    """Repeats a datum with weight 0: no loss, no metrics."""


def balance(costs: npt.NDArray[np.int64], num_ranks: int) -> list[list[int]]:
    """Assigns datums to ranks such that the ranks' sums of `costs` (int64 [D]) are close; returns the datums of each
    rank, most expensive first. Deterministic.

    First each datum, most expensive first, goes to the rank with the lowest sum (Graham 1969). Then, repeatedly, the
    rank with the highest sum gives away one datum or swaps one with another rank, whichever leaves the larger of the
    two sums smallest; until the highest is within GOOD_ENOUGH of the mean, or no swap lowers it.
    """
    order = np.argsort(-costs, kind="stable")
    rank_D = np.zeros(len(costs), np.int64)
    heap = [(0, rank) for rank in range(num_ranks)]
    for d in order:
        cost, rank = heapq.heappop(heap)
        rank_D[d] = rank
        heapq.heappush(heap, (cost + int(costs[d]), rank))
    _swap(costs, rank_D, num_ranks)
    return [[int(d) for d in order if rank_D[d] == rank] for rank in range(num_ranks)]


def _swap(costs: npt.NDArray[np.int64], rank_D: npt.NDArray[np.int64], num_ranks: int) -> None:
    """Balances the ranks further by moving or swapping single datums. Changes `rank_D`, the rank of each datum, in
    place. Every round lowers the highest cost of a rank, or the number of ranks that have this cost, so the rounds
    end."""
    cost_R = np.bincount(rank_D, costs, num_ranks).astype(np.int64)
    nothing = np.arange(num_ranks)  # the partner gives no datum in return
    while cost_R.max() > cost_R.mean() * (1 + GOOD_ENOUGH):
        heaviest = int(cost_R.argmax())
        movable = np.flatnonzero(rank_D == heaviest)
        elsewhere = np.flatnonzero(rank_D != heaviest)
        partner = np.concatenate([rank_D[elsewhere], nothing])
        transfer = costs[movable][:, None] - np.concatenate([costs[elsewhere], np.zeros(num_ranks, np.int64)])
        larger = np.maximum(cost_R[heaviest] - transfer, cost_R[partner] + transfer)
        larger[:, partner == heaviest] = cost_R[heaviest]
        best = int(larger.argmin())
        if larger.flat[best] >= cost_R[heaviest]:
            return
        mine, theirs = divmod(best, len(partner))
        rank_D[movable[mine]] = partner[theirs]
        if theirs < len(elsewhere):
            rank_D[elsewhere[theirs]] = heaviest
        cost_R[heaviest] -= transfer[mine, theirs]
        cost_R[partner[theirs]] += transfer[mine, theirs]


def compute_cost(lengths: npt.NDArray[np.int64], attention_length: int) -> npt.NDArray[np.int64]:
    """Returns the cost of computing each sequence, int64 [D]: n tokens cost n (attention_length + n), in arbitrary
    units. At `attention_length` tokens attention, which grows with n^2, costs as much as everything else."""
    return lengths * (attention_length + lengths)


@dataclass(frozen=True)
class RankAssignment:
    """Says from the lengths alone which datums each data-parallel rank computes. It is a `trireme.core.batch.Assign`:
    any process that has it can cut a batch into the parts that the shards expect."""

    num_ranks: int
    attention_length: int
    """As in `compute_cost`."""

    def __call__(self, lengths: Numbers) -> list[Numbers]:
        """Returns for each rank the numbers of its datums, ascending. `lengths` int64 [D]: the tokens of each datum of
        the batch."""
        datums_R = balance(compute_cost(lengths, self.attention_length), self.num_ranks)
        return [np.sort(np.asarray(datums, np.int64)) for datums in datums_R]


def _cut(datums: list[int], lengths_D: npt.NDArray[np.int64], micro_batch_tokens: int) -> list[MicroBatch]:
    """Cuts `datums`, longest first, into padded rectangles of at most `micro_batch_tokens` tokens, at the lowest total
    cost: all tokens with padding, plus MICRO_BATCH_COST for each rectangle. A longer datum is alone.

    `least[i]` is the cost of the first i datums; the last rectangle for these begins at datum `begin[i]`.
    """
    lengths = lengths_D[datums]
    least = np.zeros(len(datums) + 1, np.int64)
    begin = np.zeros(len(datums) + 1, np.int64)
    first = 0  # where the last rectangle may begin
    for i in range(1, len(datums) + 1):
        while first < i - 1 and (i - first) * lengths[first] > micro_batch_tokens:
            first += 1
        starts = np.arange(first, i)
        costs = least[first:i] + (i - starts) * lengths[first:i] + MICRO_BATCH_COST
        begin[i] = first + int(costs.argmin())
        least[i] = costs.min()
    micro_batches = []
    end = len(datums)
    while end:
        micro_batches.append(MicroBatch(tuple(datums[int(begin[end]) : end])))
        end = int(begin[end])
    return micro_batches[::-1]


def _pack(datums: list[int], lengths_D: npt.NDArray[np.int64], micro_batch_tokens: int) -> list[MicroBatch]:
    """Packs `datums`, longest first, into rows of at most `micro_batch_tokens` tokens: each datum goes into the first
    row that has room for it (first-fit decreasing, Johnson 1973). A datum longer than a row is alone."""
    rows: list[list[int]] = []
    room: list[np.int64] = []
    for d in datums:
        fitting = next((row for row, free in enumerate(room) if free >= lengths_D[d]), None)
        if fitting is None:
            rows.append([d])
            room.append(micro_batch_tokens - lengths_D[d])
        else:
            rows[fitting].append(d)
            room[fitting] -= lengths_D[d]
    return [MicroBatch(tuple(row)) for row in rows]


def plan(
    lengths: npt.NDArray[np.int64],
    num_ranks: int,
    micro_batch_tokens: int,
    attention_length: int,
    packed: bool = False,
    micro_batch_size: int | None = None,
) -> list[list[MicroBatch]]:
    """Returns the micro-batches of each rank, [R][M] with the same M for all ranks. Every datum is in exactly one
    micro-batch, not counting fillers.

    `lengths` int64 [D], D >= 1; `attention_length` as in `compute_cost`. If `micro_batch_size` is given, a micro-batch
    has at most that number of datums, and `micro_batch_tokens` is ignored. Deterministic.
    """
    datums_R = balance(compute_cost(lengths, attention_length), num_ranks)
    if micro_batch_size:
        firsts = range(0, len(lengths), micro_batch_size)
        cut_R = [[datums[first : first + micro_batch_size] for first in firsts] for datums in datums_R]
        micro_R = [[MicroBatch(tuple(part)) for part in parts if part] for parts in cut_R]
    else:
        cut = _pack if packed else _cut
        micro_R = [cut(datums, lengths, micro_batch_tokens) for datums in datums_R]
    longest = max(len(micro_M) for micro_M in micro_R)
    filler = MicroBatch((int(np.argmin(lengths)),), filler=True)
    return [micro_M + [filler] * (longest - len(micro_M)) for micro_M in micro_R]


class Rows:
    """The places of the tokens of some datums when each datum is a row of a rectangle, padded on the right.

    `index` int64 [rows, longest]: where each token is in the batch's tokens; `present` bool [rows, longest]: False at
    the padding.
    """

    def __init__(self, offsets: npt.NDArray[np.int64], datums: Sequence[int] | Numbers) -> None:
        chosen = np.asarray(datums, np.int64)
        starts = offsets[chosen]
        lengths = offsets[chosen + 1] - offsets[chosen]
        place = np.arange(lengths.max())
        self.present = place < lengths[:, None]
        self.index = (starts[:, None] + place) * self.present

    def pad(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns `values`, a column [T] of the batch, as rows [rows, longest], 0 at the padding."""
        return np.where(self.present, values[self.index], values.dtype.type(0))


class Packed:
    """The places of the tokens of some datums when the datums follow each other in one row of T tokens.

    For each token, int64 [T]: `index`, its place in the batch's tokens; `positions`, its place in its datum; `datum`,
    the number of its datum within the row. `starts` int32 [datums + 1]: where each datum begins in the row; `longest`:
    tokens of the longest datum. `rows`: where the datums, as padded rows, find their tokens in this row.
    """

    def __init__(self, offsets: npt.NDArray[np.int64], datums: Sequence[int] | Numbers) -> None:
        chosen = np.asarray(datums, np.int64)
        lengths = offsets[chosen + 1] - offsets[chosen]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        self.starts = starts.astype(np.int32)
        self.longest = int(lengths.max())
        self.positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        self.index = np.repeat(offsets[chosen], lengths) + self.positions
        self.datum = np.repeat(np.arange(len(chosen)), lengths)
        self.rows = Rows(starts, range(len(chosen)))


@dataclass(frozen=True)
class ShardOutput:
    """Results of one shard: log-probabilities of the datums that it computed, and metrics."""

    datums: tuple[int, ...]
    """The numbers in the batch of the datums that it computed."""
    logprobs: npt.NDArray[np.float32]
    """Log-probabilities of these datums, one after the other."""
    metrics: Mapping[str, float]
    suspects: tuple[int, ...] = ()
    """The datums with a loss that is not finite (`trainer.batch_checks`)."""
    peak_s: float = 0.0
    """Its share of `ForwardBackwardOutput.peak_s`."""

    def parts(self, lengths: Numbers) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yields (number in the batch, logprobs float32 [tokens]) of each datum that the shard computed. `lengths`
        int64 [D]: the tokens of every datum of the batch."""
        offset = 0
        for d in self.datums:
            yield d, self.logprobs[offset : offset + lengths[d]]
            offset += int(lengths[d])

    def as_column(self, part: BatchPart) -> npt.NDArray[np.float32]:
        """Returns the logprobs as a column of `part`, float32 [T], in the order of its tokens; 0 for datums that this
        shard did not compute."""
        offsets = part.batch.offsets
        column = np.zeros(len(part.batch.tokens), np.float32)
        for (_, values), n in zip(self.parts(part.lengths), part.places(self.datums), strict=True):
            column[offsets[n] : offsets[n + 1]] = values
        return column


def collect(
    lengths: Numbers, computed: Sequence[tuple[MicroBatch, Tensor]], metrics: Mapping[str, float]
) -> ShardOutput:
    """Makes the shard's output from its computed micro-batches, each with its logprobs [rows, longest]; drops padding
    and fillers. `lengths` int64 [D]: the tokens of every datum of the batch."""
    datums = tuple(d for micro, _ in computed if not micro.filler for d in micro.datums)
    rows = [row for micro, p in computed if not micro.filler for row in p.cpu().numpy()]
    parts = [row[: lengths[d]] for d, row in zip(datums, rows, strict=True)]
    return ShardOutput(datums, np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32), metrics)


@dataclass(frozen=True)
class SummarizedOutput:
    """Results of one shard where the log-probabilities stay in the object store: a reference to them, and K numbers for
    each datum that the shard computed."""

    datums: Numbers
    """[N], the numbers in the batch of the datums that it computed."""
    column: Any
    """float32, the log-probabilities in the order of the tokens of its part, 0 for datums that it did not compute; a
    reference to them once they have left the shard's process."""
    sums: npt.NDArray[np.float64]
    """[K, N], K numbers about each of these datums."""


def scatter_outputs(batch: Batch, outputs_R: Sequence[ShardOutput]) -> npt.NDArray[np.float32]:
    """Joins the logprobs of all shards in the order of the batch's tokens: float32 [T], NaN for a datum that no shard
    computed."""
    lengths = batch.lengths
    offsets = batch.offsets
    logprobs = np.full(int(offsets[-1]), np.nan, dtype=np.float32)
    for output in outputs_R:
        for d, values in output.parts(lengths):
            logprobs[offsets[d] : offsets[d + 1]] = values
    return logprobs


def scatter_sums(num_datums: int, outputs_R: Sequence[SummarizedOutput]) -> npt.NDArray[np.float64]:
    """Joins the shards' `sums` in the order of the batch's datums: float64 [K, D], K numbers about each datum."""
    sums = np.full((len(outputs_R[0].sums), num_datums), np.nan)
    for output in outputs_R:
        sums[:, output.datums] = output.sums
    return sums
