"""Makes one batch of the batches of several adapters, and takes each one's results out of those of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainer.batching import MicroBatch
from trireme.core.batch import BatchPart, TokenBatch
from trireme.core.types import AdapterPass


@dataclass(frozen=True)
class AdapterShare:
    """One adapter's part of a batch that has the datums of several, and what is computed of it."""

    adapter: str
    first: int
    """The number of its first datum in the batch; the others follow."""
    count: int
    """How many datums it has."""
    columns: tuple[str, ...]
    """Those that it came with. In the batch it also has those of the others, with zeros."""
    loss_fn: str | None
    """None: its log-probabilities alone are asked for."""
    loss_fn_config: Mapping[str, float]

    def own(self, part: BatchPart) -> BatchPart:
        """Returns its part of a rank's part of the batch, with its own columns and its own numbers of datums. It may
        be empty."""
        here = np.flatnonzero((part.datums >= self.first) & (part.datums < self.first + self.count))
        if not len(here):
            return BatchPart(part.lengths[self.first : self.first + self.count], part.datums[:0], part.batch)
        batch = part.batch.take(here)
        batch = replace(batch, columns={name: batch.columns[name] for name in self.columns})
        return BatchPart(part.lengths[self.first : self.first + self.count], part.datums[here] - self.first, batch)


def merge(passes: Sequence[AdapterPass]) -> tuple[TokenBatch, list[AdapterShare]]:
    """Returns one batch with the datums of all, one adapter after the other, and the share of each."""
    names = {name: column.dtype for each in passes for name, column in each.batch.columns.items()}
    batches, shares, first = [], [], 0
    for each in passes:
        batch = each.batch
        filled = {name: batch.columns.get(name, np.zeros(len(batch.tokens), dtype)) for name, dtype in names.items()}
        batches.append(replace(batch, columns=filled, sequences=batch.sequences + first))
        columns = tuple(batch.columns)
        shares.append(AdapterShare(each.adapter, first, len(batch), columns, each.loss_fn, each.loss_fn_config))
        first += len(batch)
    return TokenBatch.join(batches), shares


def in_order(micro: MicroBatch) -> MicroBatch:
    """Returns the same datums in the order of the batch, so that those of a share are next to each other."""
    return replace(micro, datums=tuple(sorted(micro.datums)))


def places_of(micro: MicroBatch, shares: Sequence[AdapterShare]) -> Iterator[tuple[int, slice]]:
    """Yields the number of each share that has datums in a micro-batch `in_order`, and where these are in it."""
    firsts = [share.first for share in shares]
    owners = np.searchsorted(firsts, micro.datums, side="right") - 1
    for number in np.unique(owners):
        places = np.flatnonzero(owners == number)
        yield int(number), slice(int(places[0]), int(places[-1]) + 1)
