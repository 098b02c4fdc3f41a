"""Batches of datums: whole, as parts in the object store, and as the part of one rank.

    TokenBatch    tokens and columns of all datums, in the memory of this process
    StoredBatch   lengths, and references to all else; each process of the trainer fetches its own part
    BatchPart     the datums that one process of the trainer computes with

Which datum belongs to which part follows from the lengths and the shared prefixes alone (`trireme.core.prefixes`), by a
function that the trainer gives (`Assign`). So another process can lay out the parts, and no process needs to hold or
send the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.core.actors import Ref
from trireme.core.datum import Datum, ModelInput
from trireme.core.prefixes import Forest, Numbers

Column = npt.NDArray[np.number]
Assign = Callable[[Forest], Sequence[Numbers]]
"""Takes the forest of all datums of a batch. Returns for each process of the trainer the indices of the datums that it
computes, ascending."""
PIECE_TOKENS = 1 << 18
"""The most tokens that are laid out and stored together: few, so that no call of numpy holds Python's lock for long;
enough, so that the calls take less time than the work in them."""


Fetch = Callable[[Ref[Any], str], Any]
"""Takes a reference and the name of the process that keeps the referenced value. Returns the value."""
Put = Callable[[Any], Any]
"""Stores a value, and returns a reference to it. A Put that stores nothing returns the value itself."""


@dataclass(frozen=True)
class TokenBatch:
    """A batch of D datums in the memory of the process that uses it (the values of a `StoredBatch` are in the object
    store): all tokens in one array, with columns of numbers for each token."""

    tokens: npt.NDArray[np.int32]  # [T], all inputs concatenated; datum d is at `offsets[d]:offsets[d + 1]`
    offsets: Numbers  # [D + 1]
    columns: Mapping[str, Column]  # [T] each, in the order of the tokens
    temperatures: npt.NDArray[np.float32]  # [D]
    sequences: Numbers = field(default=None)  # type: ignore[arg-type]
    """[D], for each datum the index of the rollout that its tokens come from. Losses count a rollout as one sequence,
    also if its tokens are in several datums. By default each datum is a sequence by itself."""

    def __post_init__(self) -> None:
        if self.sequences is None:
            object.__setattr__(self, "sequences", np.arange(len(self)))

    @classmethod
    def from_datums(cls, data_D: Sequence[Datum]) -> TokenBatch:
        """Concatenates datums into a batch, in which each datum is a sequence by itself. Raises ValueError if there are
        no datums, and for a datum that has no tokens or has other columns than the first datum."""
        if not data_D:
            raise ValueError("a batch needs at least one datum, got none")
        names = set(data_D[0].loss_fn_inputs)
        lengths_D = [d.model_input.length for d in data_D]
        for d, datum in enumerate(data_D):
            if set(datum.loss_fn_inputs) != names or not lengths_D[d]:
                raise ValueError(
                    f"datum {d} has {lengths_D[d]} tokens and the columns {', '.join(sorted(datum.loss_fn_inputs))}; "
                    f"expected at least one token, and the columns of datum 0: {', '.join(sorted(names))}"
                )
        return cls(
            tokens=np.concatenate([d.model_input.tokens for d in data_D]),
            offsets=np.concatenate([[0], np.cumsum(lengths_D)]).astype(np.int64),
            columns={name: np.concatenate([d.loss_fn_inputs[name].data for d in data_D]) for name in sorted(names)},
            temperatures=np.asarray([d.temperature for d in data_D], dtype=np.float32),
        )

    @classmethod
    def of(cls, data: TokenBatch | Sequence[Datum]) -> TokenBatch:
        """Returns `data` itself if it is a TokenBatch, else a batch of its datums. Raises ValueError as `from_datums`
        does."""
        if isinstance(data, TokenBatch):
            return data
        return cls.from_datums(data)

    @classmethod
    def join(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """Concatenates batches with the same columns."""
        if len(batches) == 1:
            return batches[0]
        lengths = np.concatenate([batch.lengths for batch in batches])
        return cls(
            tokens=np.concatenate([batch.tokens for batch in batches]),
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            columns={name: np.concatenate([batch.columns[name] for batch in batches]) for name in batches[0].columns},
            temperatures=np.concatenate([batch.temperatures for batch in batches]),
            sequences=np.concatenate([batch.sequences for batch in batches]),
        )

    def take(self, datums: Numbers) -> TokenBatch:
        """Returns a batch of the datums with the indices `datums`, in the order given."""
        if len(datums) == len(self) and np.array_equal(datums, np.arange(len(self))):
            return self
        starts = self.offsets[datums].tolist()
        ends = self.offsets[datums + 1].tolist()
        parts = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        return TokenBatch(
            tokens=np.concatenate([self.tokens[part] for part in parts]),
            offsets=np.concatenate([[0], np.cumsum(self.lengths[datums])]),
            columns={name: np.concatenate([column[part] for part in parts]) for name, column in self.columns.items()},
            temperatures=self.temperatures[datums],
            sequences=self.sequences[datums],
        )

    def mapped(self, function: BatchMap) -> TokenBatch:
        """Returns `function(self)`, the same datums with other columns. A StoredBatch has this method too, so a caller
        need not know which kind of batch it has."""
        return function(self)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Numbers:
        """Number of tokens of each datum, int64 [D]."""
        return np.diff(self.offsets)

    def find_forest(self) -> Forest:
        """Returns the lengths of all datums and the prefixes that they share."""
        return Forest.find(np.split(self.tokens, self.offsets[1:-1]))

    def datum(self, d: int) -> Datum:
        part = slice(int(self.offsets[d]), int(self.offsets[d + 1]))
        return Datum(
            ModelInput(self.tokens[part]),
            {name: column[part] for name, column in self.columns.items()},
            float(self.temperatures[d]),
        )


BatchMap = Callable[[TokenBatch], TokenBatch]
"""A function that returns the same datums with other columns. It is called with the datums of one part of a batch, so
the columns of a datum may depend on that datum alone. Must be picklable."""
LayOut = Callable[[Numbers], TokenBatch]
"""Takes indices of datums of a batch, ascending. Returns these datums as a batch."""
Summary = Callable[[TokenBatch], npt.NDArray[np.float64]]
"""A function that returns K numbers for each datum, float64 [K, D]. The numbers of a datum may depend on that datum
alone. Must be picklable."""


@dataclass(frozen=True)
class BatchPart:
    """The datums of a batch that one process of the trainer needs: its own datums, and the shortest datum of the batch.
    A process with nothing left to compute repeats the shortest datum with weight 0."""

    forest: Forest
    """The forest of all datums of the batch. From it every process makes the same plan of the computation."""
    datums: Numbers
    """[N], the indices of this part's datums in the whole batch, ascending."""
    batch: TokenBatch
    """The N datums of this part."""

    @classmethod
    def of(cls, data: BatchPart | TokenBatch) -> BatchPart:
        """Returns `data` itself if it is a part already, else the part that has all datums."""
        if isinstance(data, BatchPart):
            return data
        return cls(data.find_forest(), np.arange(len(data)), data)

    @property
    def lengths(self) -> Numbers:
        """The number of tokens of each datum of the whole batch, int64 [D]."""
        return self.forest.lengths

    def places(self, datums: Sequence[int]) -> Numbers:
        """Converts `datums`, indices in the whole batch, to indices in this part (in `self.batch`). Raises ValueError
        if a datum is not in this part."""
        numbers = np.asarray(datums, np.int64)
        places = np.searchsorted(self.datums, numbers)
        absent = numbers[self.datums[np.minimum(places, len(self.datums) - 1)] != numbers]
        if len(absent):
            raise ValueError(
                f"datum {absent[0]} is not in this shard's part of the batch; expected a batch that was divided by "
                "this trainer's own trainer.batching.RankAssignment"
            )
        return places


@dataclass(frozen=True)
class PartPieces:
    """A `BatchPart` in the object store, cut into pieces."""

    forest: Forest
    datums: Numbers
    pieces: tuple[Ref[TokenBatch] | TokenBatch, ...]
    """The part's datums, cut into pieces of at most PIECE_TOKENS tokens (a longer datum is a piece by itself). Each
    piece is a reference to a TokenBatch, or the TokenBatch itself. Pieces are stored one by one, because storing holds
    Python's lock while it copies."""

    def opened(self, fetch: Fetch, owner: str) -> BatchPart:
        """Fetches the pieces of this part of a batch, and joins them into a BatchPart. `fetch(piece, owner)` returns a
        stored piece. `owner`: the name of the process that keeps the pieces."""
        pieces = [piece if isinstance(piece, TokenBatch) else fetch(piece, owner) for piece in self.pieces]
        return BatchPart(self.forest, self.datums, TokenBatch.join(pieces))


@dataclass(frozen=True)
class StoredPart:
    """Says where a process of the trainer finds its part of a `StoredBatch`, and what it adds or changes after
    fetching."""

    part: Ref[PartPieces] | PartPieces
    """The pieces of the part, or a reference to them."""
    owner: str
    """The name of the process that keeps the stored values of the part."""
    columns: tuple[tuple[str, Ref[Column]], ...] = ()
    """For each column that `StoredBatch.with_column` has added: its name, and a reference to its values for this
    part."""
    maps: tuple[BatchMap, ...] = ()
    """The functions that `StoredBatch.mapped` has added. They are applied to the fetched part, in this order."""

    def opened(self, fetch: Fetch) -> BatchPart:
        """Fetches this part of a batch, adds the columns in `self.columns`, then applies the functions in `self.maps`
        in order. Returns the resulting part. `fetch(reference, owner)` returns a stored value."""
        if isinstance(self.part, PartPieces):
            stored = self.part
        else:
            stored = fetch(self.part, self.owner)
        part = stored.opened(fetch, self.owner)
        columns = {name: fetch(column, self.owner) for name, column in self.columns}
        if columns:
            batch = replace(part.batch, columns={**part.batch.columns, **columns})
        else:
            batch = part.batch
        for function in self.maps:
            batch = batch.mapped(function)
        return replace(part, batch=batch)


@dataclass(frozen=True)
class StoredBatch:
    """A batch of D datums. Their tokens and columns are in the object store, as one part for each process of the
    trainer."""

    forest: Forest
    sequences: Numbers  # [D], as in `TokenBatch`
    parts_R: tuple[StoredPart, ...]

    @classmethod
    def store(
        cls,
        forest: Forest,
        sequences: Numbers,
        lay_out: LayOut,
        assign: Assign,
        put: Put = lambda value: value,
        owner: str = "driver",
    ) -> StoredBatch:
        """Builds a batch and stores it in parts, one part for each process of the trainer. Returns the batch.

        `forest`: lengths and shared prefixes of all datums. `sequences`: [D], for each datum the index of the rollout
        that its tokens come from (`TokenBatch.sequences`). `assign` says which datums belong to which part. `lay_out`
        takes indices of datums, and returns these datums as a TokenBatch. `put` stores a value and returns a reference
        to it. `owner`: the name of the process that keeps the stored values.

        Each part is built and stored in pieces of at most PIECE_TOKENS tokens. If `put` stores outside of this process,
        only one piece at a time is in this process's memory.
        """
        shortest = int(np.argmin(forest.lengths))
        parts_R = []
        for assigned in assign(forest):
            datums = np.union1d(assigned, [shortest])
            pieces = tuple(put(lay_out(piece)) for piece in cut_pieces(datums, forest.lengths))
            parts_R.append(StoredPart(put(PartPieces(forest, datums, pieces)), owner))
        return cls(forest, sequences, tuple(parts_R))

    def __len__(self) -> int:
        return len(self.forest)

    @property
    def lengths(self) -> Numbers:
        """The number of tokens of each datum, int64 [D]."""
        return self.forest.lengths

    @property
    def offsets(self) -> Numbers:
        """Offsets of the datums, int64 [D + 1]: element d is the position of datum d's first token when all datums are
        concatenated; the last element is the total number of tokens."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def mapped(self, function: BatchMap) -> StoredBatch:
        """Returns the same batch with `function` added: each process applies it to its part after fetching."""
        return replace(self, parts_R=tuple(replace(part, maps=(*part.maps, function)) for part in self.parts_R))

    def with_column(self, name: str, column_R: Sequence[Ref[Column]]) -> StoredBatch:
        """Returns the same batch with a further column `name`. `column_R`: for each part, a reference to the column's
        values."""
        parts_R = zip(self.parts_R, column_R, strict=True)
        return replace(
            self, parts_R=tuple(replace(part, columns=(*part.columns, (name, ref))) for part, ref in parts_R)
        )

    def whole(self, fetch: Fetch) -> TokenBatch:
        """Fetches all parts, and returns all datums in their order as one batch. `fetch(reference, owner)` returns a
        stored value."""
        parts = [part.opened(fetch) for part in self.parts_R]
        numbers, first = np.unique(np.concatenate([part.datums for part in parts]), return_index=True)
        assert len(numbers) == len(self), "every datum is in a part"
        return TokenBatch.join([part.batch for part in parts]).take(first)


Batch = TokenBatch | StoredBatch
Data = Batch | Sequence[Datum]
"""Data that the trainer's verbs accept."""


def cut_pieces(datums: Numbers, lengths: Numbers) -> Iterator[Numbers]:
    """Cuts `datums`, [N] indices of datums in a batch, into consecutive pieces of at most PIECE_TOKENS tokens. A datum
    with more tokens is a piece by itself. Yields the indices in each piece. `lengths`: [D], the number of tokens of
    each datum of the batch."""
    ends = np.cumsum(lengths[datums])
    first = 0
    while first < len(datums):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + PIECE_TOKENS, side="right")))
        yield datums[first:last]
        first = last
