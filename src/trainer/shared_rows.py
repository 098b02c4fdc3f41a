"""A micro-batch in which datums share prefixes: one row in which each common prefix stands once (a row of distinct
tokens), and the places in it of each datum's tokens.

The row has each datum's own tokens, one datum after the other: the tokens after the prefix that it shares with the
datum before it. `path` leads from the tokens of all datums to their places in the row:

    datums   A B C | A B D E     shared  0, 2
    row      A B C D E           positions  0 1 2 2 3
    path     0 1 2 | 0 1 3 4

The model computes the row. The output matrix is applied once for each pair of a place in the row and a temperature
(`HeadRows`), however many datums have it. The log-probabilities then return to the columns of the datums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trireme.core.prefixes import Numbers


class SharedRow:
    """Index arrays for a row of Q tokens that holds several datums, with each common prefix once. A datum's own tokens
    are the tokens after its shared prefix. K is the number of tokens of all datums, prefixes included.

    For each token of the row, int64 [Q]: `index`, its place in the batch's tokens; `positions`, its place in its datum.
    `path` int64 [K]: for each token of each datum, its place in the row. `own_starts` int32 [datums + 1]: where each
    datum's own tokens begin in the row. `starts` int32 [datums + 1]: where each datum's tokens begin in `path`.
    `longest_own`: the largest number of own tokens that any datum has; `longest`: the largest number of tokens that any
    datum has. For each token of each datum, int64 [K]: `datum`, the index of its datum among these datums;
    `flat_index`, its place in the batch's tokens.
    """

    def __init__(self, offsets: Numbers, datums: Numbers, shared: Sequence[int]) -> None:
        lengths = offsets[datums + 1] - offsets[datums]
        own_lengths = lengths - np.asarray(shared, np.int64)
        own_starts = np.concatenate([[0], np.cumsum(own_lengths)])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        self.path = np.empty(starts[-1], np.int64)
        before = self.path[:0]
        for d, prefix in enumerate(shared):
            path = self.path[starts[d] : starts[d + 1]]
            path[:prefix] = before[:prefix]
            path[prefix:] = np.arange(own_starts[d], own_starts[d + 1])
            before = path
        self.own_starts = own_starts.astype(np.int32)
        self.starts = starts.astype(np.int32)
        self.longest_own = int(own_lengths.max())
        self.longest = int(lengths.max())
        self.positions = np.arange(own_starts[-1]) - np.repeat(own_starts[:-1] - shared, own_lengths)
        self.index = np.repeat(offsets[datums], own_lengths) + self.positions
        self.datum = np.repeat(np.arange(len(datums)), lengths)
        flat_positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        self.flat_index = np.repeat(offsets[datums], lengths) + flat_positions

    def arguments(self, to_device: Callable[[npt.NDArray[Any]], Tensor]) -> dict[str, Any]:
        """Returns the arguments of the model's forward pass that say where the datums are (`trainer.attention`)."""
        return {
            "position_ids": to_device(self.positions)[None],
            "cu_seq_lens_q": to_device(self.own_starts),
            "max_length_q": self.longest_own,
            "cu_seq_lens_k": to_device(self.starts),
            "max_length_k": self.longest,
            "path": to_device(self.path),
        }


@dataclass(frozen=True)
class HeadRows:
    """The N rows (hidden states) that are multiplied by the output matrix, and their M targets, sorted by row. Each row
    is for one place in a `SharedRow` and one temperature."""

    hidden: Numbers
    """[N], the place in the `SharedRow` whose hidden state each row is."""
    temperatures: npt.NDArray[np.float32]
    """[N]."""
    bounds: Numbers
    """[N + 1]: the targets of row n are those from `bounds[n]` to `bounds[n + 1]`."""
    chosen: Numbers
    """[M], the place in `SharedRow.path` of the token that each target belongs to."""

    @classmethod
    def of(
        cls, row: SharedRow, temperatures: npt.NDArray[np.float32], counted: npt.NDArray[np.bool_] | None
    ) -> HeadRows:
        """Returns the rows for the targets of the tokens of `row`. Targets with the same place and the same temperature
        use the same row. `temperatures` float32 [datums]; `counted` bool [K]: the tokens whose targets are computed,
        None: all. At least one target is computed, because each micro-batch takes part in the backward pass."""
        if counted is None:
            tokens = np.arange(len(row.path))
        else:
            tokens = np.flatnonzero(counted)
        if not len(tokens):
            tokens = np.zeros(1, np.int64)
        values, numbers = np.unique(temperatures, return_inverse=True)
        keys = row.path[tokens] * len(values) + numbers[row.datum[tokens]]
        order = np.argsort(keys, kind="stable")
        distinct, counts = np.unique(keys, return_counts=True)
        return cls(
            hidden=distinct // len(values),
            temperatures=values[distinct % len(values)],
            bounds=np.concatenate([[0], np.cumsum(counts)]),
            chosen=tokens[order],
        )
