"""The plan: which datums a shard computes together, and how its results return to the order of the batch.

A micro-batch is a rectangle of rows (one datum each, padded on the right to the longest); or packed, one row of datums
that do not see each other; or with shared prefixes, one row in which each common prefix stands once
(`trainer.shared_rows`). It has at most `micro_batch_tokens` tokens, with padding. This bounds memory and changes
nothing else, because losses are sums over tokens. Every rank computes the same plan from the same lengths and shared
prefixes, and takes its own part. Other rooms use only the first half of the plan, which says which datums each rank
computes. All ranks run the same number of micro-batches, so that all take part in each collective; a rank with fewer
micro-batches runs fillers, which repeat a datum with weight 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.config.trainer import SharePrefixes
from trireme.core.batch import Batch, BatchPart
from trireme.core.prefixes import Forest, Numbers
from trireme.plan.memory import FLAT_TOKENS

MICRO_BATCH_COST = 32
"""Fixed cost of a micro-batch (gathering each layer, reducing its gradient), in tokens computed."""
GOOD_ENOUGH = 1e-4
"""Share by which the highest cost of a rank may exceed the mean."""
OVER_MEAN = 1.1
"""A tree that costs more than this times the mean cost of a rank is cut in two. The value is above 1 because the more
expensive half may cost a little more than the mean; with 1, it would be cut again."""
OVER_LONGEST = 1.25
"""A row with shared prefixes may have this many times the tokens of the longest datum, if that is more than
`micro_batch_tokens`: else a datum longer than a row could share its prefix with no other datum."""
LEAST_SAVING = 0.05
"""Share of the cost that shared prefixes must save, with `trainer.share_prefixes` auto."""


@dataclass(frozen=True)
class MicroBatch:
    """The datums that a shard computes together in one pass."""

    datums: tuple[int, ...]
    """Their numbers in the batch."""
    shared: tuple[int, ...] = ()
    """For each datum, the number of tokens at its beginning that it shares with the datum before it, 0 for the first;
    empty if nothing is shared."""
    filler: bool = False
    """True: it repeats a datum with weight 0, so that this rank takes part in collectives; it has no loss and no
    metrics."""

    def sizes(self, lengths: Numbers) -> tuple[Numbers, Numbers]:
        """Returns two arrays int64 [N] for the N datums of the micro-batch: the number of tokens of each datum, and how
        many of them it shares with the datum before it. `lengths` int64 [D]: the tokens of every datum of the batch."""
        whole = lengths[list(self.datums)]
        return whole, np.asarray(self.shared or np.zeros(len(whole)), np.int64)


def balance(costs: npt.NDArray[np.int64], num_ranks: int) -> list[list[int]]:
    """Assigns datums to ranks such that the ranks' sums of `costs` (int64 [D]) are close; returns the datums of each
    rank, most expensive first. Deterministic.

    First each datum, most expensive first, goes to the rank with the lowest sum (Graham 1969). Then, in each round, the
    rank with the highest sum gives one datum to another rank or swaps one with it. The round chooses the move or swap
    that minimises the larger sum of these two ranks. The rounds end when the highest sum is within GOOD_ENOUGH of the
    mean, or when no move or swap lowers it.
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
    units. The term n^2 is the cost of attention. In a sequence of `attention_length` tokens, attention costs as much as
    everything else."""
    return lengths * (attention_length + lengths)


@dataclass(frozen=True)
class Tree:
    """Datums that one rank computes together, consecutive in the order of a `Forest`."""

    datums: Numbers
    """[N], their numbers in the batch."""
    shared: Numbers
    """[N], as in `Forest`; 0 for the first one."""

    def part(self, first: int, end: int) -> Tree:
        """Returns the tree of the datums from place `first` up to, not including, place `end`. Its first datum shares
        nothing, so it is computed whole."""
        shared = self.shared[first:end].copy()
        shared[0] = 0
        return Tree(self.datums[first:end], shared)


@dataclass(frozen=True)
class RankAssignment:
    """Decides which datums each data-parallel rank computes, from the datums' lengths and shared prefixes. It is a
    `trireme.core.batch.Assign`: any process that has it can cut a batch into the parts that the shards expect."""

    num_ranks: int
    attention_length: int
    """As in `compute_cost`."""
    share: SharePrefixes
    """`trainer.share_prefixes`."""

    def __call__(self, forest: Forest) -> list[Numbers]:
        """Returns for each rank the numbers of its datums, ascending."""
        trees_R = self.trees(forest)
        if trees_R is None:
            datums_R = self.datums(forest.lengths)
        else:
            datums_R = [[int(d) for tree in trees for d in tree.datums] for trees in trees_R]
        return [np.sort(np.asarray(datums, np.int64)) for datums in datums_R]

    def datums(self, lengths: Numbers) -> list[list[int]]:
        """Assigns the datums to ranks as if no prefixes were shared: returns for each rank the numbers of its datums,
        most expensive first."""
        return balance(compute_cost(lengths, self.attention_length), self.num_ranks)

    def trees(self, forest: Forest) -> list[list[Tree]] | None:
        """Returns the trees of each rank, most expensive first. Returns None if nothing is shared. With `share` auto,
        also returns None if sharing lowers the highest cost of a rank by less than LEAST_SAVING. The decision depends
        on the forest alone, not on measured times."""
        if self.share == "off" or not forest.shared.any():
            return None
        trees, cost_N = self._cut_trees(forest)
        trees_R = balance(cost_N, self.num_ranks)
        if self.share == "auto":
            flat_D = compute_cost(forest.lengths, self.attention_length)
            highest = max(int(flat_D[datums].sum()) for datums in self.datums(forest.lengths))
            if max(int(cost_N[numbers].sum()) for numbers in trees_R) > (1 - LEAST_SAVING) * highest:
                return None
        return [[trees[n] for n in numbers] for numbers in trees_R]

    def _cut_trees(self, forest: Forest) -> tuple[list[Tree], Numbers]:
        """Returns the trees of the forest and the cost of each tree, int64 [N]. If a tree of several datums costs more
        than OVER_MEAN times the mean cost of a rank, it is cut in two. The cut minimises the cost of the more expensive
        part. A part that still costs too much is cut again."""
        order = forest.order
        prefix_D = compute_cost(forest.shared, self.attention_length)
        cost_D = compute_cost(forest.lengths[order], self.attention_length) - prefix_D
        total = int(cost_D.sum())
        roots = np.flatnonzero(forest.shared == 0).tolist()
        pending = list(zip(roots, [*roots[1:], len(forest)], strict=True))[::-1]
        trees: list[Tree] = []
        costs: list[int] = []
        while pending:
            first, end = pending.pop()
            cost = int(cost_D[first:end].sum() + prefix_D[first])
            if cost * self.num_ranks <= OVER_MEAN * total or end - first == 1:
                trees.append(Tree(order, forest.shared).part(first, end))
                costs.append(cost)
            else:
                left_costs = np.cumsum(cost_D[first : end - 1]) + prefix_D[first]
                right_costs = cost + prefix_D[first + 1 : end] - left_costs
                cut = first + 1 + int(np.maximum(left_costs, right_costs).argmin())
                total += int(prefix_D[cut])  # which both parts compute
                pending += [(cut, end), (first, cut)]
        return trees, np.asarray(costs, np.int64)


def _cut(datums: list[int], lengths_D: npt.NDArray[np.int64], micro_batch_tokens: int) -> list[MicroBatch]:
    """Cuts `datums`, longest first, into padded rectangles of at most `micro_batch_tokens` tokens, at the lowest total
    cost: all tokens with padding, plus MICRO_BATCH_COST for each rectangle. A datum longer than `micro_batch_tokens` is
    a rectangle by itself.

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
    row that has room for it (first-fit decreasing, Johnson 1973). A datum longer than a row gets its own row."""
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


@dataclass(frozen=True)
class RowSize:
    """The size of a row of datums in which each common prefix stands once."""

    distinct: int
    """Tokens of the row."""
    datums: int
    longest: int
    """Tokens of the longest datum. A loss of the user's gets columns as rectangles [datums, longest]."""

    def joined(self, other: RowSize) -> RowSize:
        """Returns the size of one row with the datums of both rows."""
        longest = max(self.longest, other.longest)
        return RowSize(self.distinct + other.distinct, self.datums + other.datums, longest)

    def fits(self, most_tokens: float) -> bool:
        """Returns True if the row has at most `most_tokens` tokens, and its padded rectangle [datums, longest] has at
        most FLAT_TOKENS * `most_tokens` places."""
        return self.distinct <= most_tokens and self.datums * self.longest <= FLAT_TOKENS * most_tokens


def _pack_trees(trees: Sequence[Tree], lengths_D: Numbers, most_tokens: float) -> list[MicroBatch]:
    """Packs trees into rows that fit (`RowSize.fits`). A tree that is too large is cut into parts. Each tree or part
    goes into the first row that has room for it."""
    rows: list[tuple[list[int], list[int]]] = []
    sizes: list[RowSize] = []
    for part, size in (cut for tree in trees for cut in _cut_tree(tree, lengths_D, most_tokens)):
        joined = (row_size.joined(size) for row_size in sizes)
        row = next((row for row, both in enumerate(joined) if both.fits(most_tokens)), len(rows))
        if row == len(rows):
            rows.append(([], []))
            sizes.append(size)
        else:
            sizes[row] = sizes[row].joined(size)
        rows[row][0].extend(part.datums.tolist())
        rows[row][1].extend(part.shared.tolist())
    return [MicroBatch(tuple(datums), tuple(shared)) for datums, shared in rows]


def _cut_tree(tree: Tree, lengths_D: Numbers, most_tokens: float) -> Iterator[tuple[Tree, RowSize]]:
    """Cuts the tree into parts that fit into a row (`RowSize.fits`), and yields each part with its size. The first
    datum of a part shares nothing, so that it is computed whole."""
    first = 0
    size = RowSize(0, 0, 0)
    lengths = lengths_D[tree.datums].tolist()
    for n, (length, shared) in enumerate(zip(lengths, tree.shared.tolist(), strict=True)):
        longer = size.joined(RowSize(length - shared, 1, length))
        if n > first and not longer.fits(most_tokens):
            yield tree.part(first, n), size
            first = n
            longer = RowSize(length, 1, length)
        size = longer
    yield tree.part(first, len(lengths)), size


def plan(
    forest: Forest,
    assignment: RankAssignment,
    micro_batch_tokens: int,
    *,
    packed: bool = False,
    shares: bool = False,
) -> list[list[MicroBatch]]:
    """Returns the micro-batches of each rank, [R][M]. Every datum is in exactly one micro-batch, not counting fillers.
    A filler is a micro-batch that repeats a datum with weight 0. A rank that needs fewer micro-batches than another
    rank gets fillers, so that all ranks have M micro-batches. Deterministic.

    `forest` has at least one datum. `shares`: True if the policy and the reference can be computed with shared
    prefixes. If False, `assignment` still decides the rank of each datum, but every datum is computed whole.
    """
    lengths = forest.lengths
    trees_R = assignment.trees(forest)
    if trees_R is None:
        datums_R = assignment.datums(lengths)
    else:
        numbers_R = [np.concatenate([np.zeros(0, np.int64), *(tree.datums for tree in trees)]) for trees in trees_R]
        datums_R = [numbers[np.argsort(-lengths[numbers], kind="stable")].tolist() for numbers in numbers_R]
    smallest = int(np.argmin(lengths))
    filler = MicroBatch((smallest,), filler=True)
    if trees_R is not None and shares:
        most_tokens = max(micro_batch_tokens, OVER_LONGEST * int(lengths.max()))
        micro_R = [_pack_trees(trees, lengths, most_tokens) for trees in trees_R]
        filler = MicroBatch((smallest,), (0,), filler=True)
    else:
        cut = _pack if packed else _cut
        micro_R = [cut(datums, lengths, micro_batch_tokens) for datums in datums_R]
    longest = max(len(micro_M) for micro_M in micro_R)
    return [micro_M + [filler] * (longest - len(micro_M)) for micro_M in micro_R]


class FlatTokens:
    """Index arrays for D datums that are laid out one after the other, T tokens in all.

    For each token, int64 [T]: `index`, its index in the batch's tokens; `positions`, its index in its datum; `datum`,
    the number of its datum, from 0 to D - 1; `places`, its index in the flattened rectangle of shape `shape`, (D,
    longest), in which each datum is padded on the right. `starts` int32 [D + 1]: where each datum begins in the T
    tokens, and then T. `longest`: tokens of the longest datum.
    """

    def __init__(self, offsets: npt.NDArray[np.int64], datums: Sequence[int] | Numbers) -> None:
        chosen = np.asarray(datums, np.int64)
        lengths = offsets[chosen + 1] - offsets[chosen]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        self.starts = starts.astype(np.int32)
        self.longest = int(lengths.max())
        self.shape = (len(chosen), self.longest)
        self.positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        self.index = np.repeat(offsets[chosen], lengths) + self.positions
        self.datum = np.repeat(np.arange(len(chosen)), lengths)
        self.places = self.datum * self.longest + self.positions

    def pad(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns `values`, a column of the batch, as padded rows [D, longest], 0 at the padding."""
        padded = np.zeros(self.shape, values.dtype)
        padded.flat[self.places] = values[self.index]
        return padded


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
    tokens: int = 0
    """Tokens of its datums."""
    distinct: int = 0
    """How many of these tokens it computed; fewer than all with shared prefixes."""

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


@dataclass(frozen=True)
class SummarizedOutput:
    """Results of one shard where the log-probabilities stay in the object store: a reference to them, and K numbers for
    each datum that the shard computed."""

    datums: Numbers
    """[N], the numbers in the batch of the datums that it computed."""
    column: Any
    """float32, the log-probabilities in the order of the tokens of the shard's part, 0 for datums that the shard did
    not compute. Outside of the shard's process, a reference to these log-probabilities."""
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
