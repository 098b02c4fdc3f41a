"""How a batch's columns travel between processes: lossless, in a fraction of their bytes.

Of a token that was sampled, only the token itself and its log-probability are news. The target is the next token; mask,
advantage and version stay the same over long runs; on a token that was observed all of them are fill. So a column is
stored in the first of these forms that gives it back exactly:

    Shifted   the next token of each, and the last of every datum      (target_tokens)
    Runs      values and where each begins                              (mask, advantages, versions)
    Sparse    the values at the tokens whose mask is not 0, 0 elsewhere (logprobs)
    the array itself

Values are compared by their bits: NaN and -0.0 travel like all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LONG_RUN = 4
"""Runs are worth while from this mean length on: a run costs a value and the place where it begins."""


@dataclass(frozen=True)
class Shifted:
    """`last` [D]: the value at the last token of each datum."""

    last: Array


@dataclass(frozen=True)
class Runs:
    """Run i has `values[i]` from `starts[i]` (int64, the first is 0) to the next one's start."""

    values: Array
    starts: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sparse:
    values: Array


Packed = Shifted | Runs | Sparse | Array


def pack(
    tokens: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], columns: Mapping[str, Array]
) -> dict[str, Packed]:
    """The columns ([T], 4 bytes a value) as they travel; `tokens` int32 [T] and `offsets` int64 [D + 1] as they are."""
    there = _there(columns)
    return {
        name: _pack_column(column, tokens, offsets, None if name == "mask" else there)
        for name, column in columns.items()
    }


def unpack(
    tokens: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], packed: Mapping[str, Packed]
) -> dict[str, Array]:
    """What `pack` was given."""
    columns = {name: _unpack_column(p, tokens, offsets) for name, p in packed.items() if not isinstance(p, Sparse)}
    there = _there(columns)
    for name, sparse in packed.items():
        if isinstance(sparse, Sparse):
            assert there is not None, "only with a mask is a column stored in this form"
            columns[name] = np.zeros(len(tokens), sparse.values.dtype)
            columns[name][there] = sparse.values
    return {name: columns[name] for name in packed}


def _there(columns: Mapping[str, Array]) -> npt.NDArray[np.bool_] | None:
    """Where the mask is not 0; none without a mask."""
    return columns["mask"] != 0 if "mask" in columns else None


def _bits(values: Array) -> npt.NDArray[np.int32]:
    return values.view(np.int32)


def _pack_column(
    column: Array, tokens: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], there: npt.NDArray[np.bool_] | None
) -> Packed:
    bits = _bits(column)
    if column.dtype == tokens.dtype:
        differs = bits[:-1] != tokens[1:]
        differs[offsets[1:-1] - 1] = False  # no next token within the datum: its own is stored
        if not differs.any():
            return Shifted(column[offsets[1:] - 1])
    changes = np.flatnonzero(bits[1:] != bits[:-1])
    if (len(changes) + 1) * LONG_RUN <= len(column):
        starts = np.concatenate([[0], changes + 1])
        return Runs(column[starts], starts)
    if there is not None:
        values = column[there]
        if np.count_nonzero(_bits(values)) == np.count_nonzero(bits):  # all else is 0
            return Sparse(values)
    return column


def _unpack_column(packed: Packed, tokens: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]) -> Array:
    if isinstance(packed, Shifted):
        column = np.empty(len(tokens), packed.last.dtype)
        column[:-1] = tokens[1:]
        column[offsets[1:] - 1] = packed.last
        return column
    if isinstance(packed, Runs):
        return np.repeat(packed.values, np.diff(packed.starts, append=len(tokens)))
    assert isinstance(packed, np.ndarray)
    return packed
