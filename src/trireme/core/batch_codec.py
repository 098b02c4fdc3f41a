"""Packs the columns of a batch for their way between processes: lossless, in a fraction of the bytes.

Only the token and its log-probability are news about a sampled token. The target is the next token; mask, advantage and
version stay the same over long runs; observed tokens have fill values. So a column is stored in the first of these
forms that gives it back exactly:

    shifted   each value is the next token; stored are the last values of the datums  (target_tokens)
    runs      values, and where each run begins                                       (mask, advantages, versions)
    sparse    the values at tokens whose mask is not 0; 0 elsewhere                   (logprobs)
    plain     the array itself

Values are compared by their bits, so NaN and -0.0 are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LONG_RUN = 4
"""Mean length from which runs pay: a run costs a value and its start."""


@dataclass(frozen=True)
class PackedColumn:
    """A column in one of the forms above."""

    form: Literal["shifted", "runs", "sparse", "plain"]
    values: Array  # the stored values; if shifted [D], the last of each datum
    starts: npt.NDArray[np.int64] | None = None  # of runs: run i is at `starts[i]:starts[i + 1]`


def pack(
    tokens: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], columns: Mapping[str, Array]
) -> dict[str, PackedColumn]:
    """Packs columns [T] of 4-byte values. `tokens` int32 [T] and `offsets` int64 [D + 1] travel as they are."""
    sampled = columns["mask"] != 0 if "mask" in columns else None
    return {
        name: _pack_column(column, tokens, offsets, None if name == "mask" else sampled)
        for name, column in columns.items()
    }


def unpack(
    tokens: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], packed: Mapping[str, PackedColumn]
) -> dict[str, Array]:
    """Returns the columns that `pack` was given."""
    columns = {}
    for name in sorted(packed, key=lambda name: packed[name].form == "sparse"):  # which need the mask, so they are last
        column = packed[name]
        if column.form == "shifted":
            columns[name] = np.append(tokens[1:], tokens[:1]).astype(column.values.dtype, copy=False)
            columns[name][offsets[1:] - 1] = column.values
        elif column.form == "runs":
            assert column.starts is not None
            columns[name] = np.repeat(column.values, np.diff(column.starts, append=len(tokens)))
        elif column.form == "sparse":
            columns[name] = np.zeros(len(tokens), column.values.dtype)
            columns[name][columns["mask"] != 0] = column.values
        else:
            columns[name] = column.values
    return {name: columns[name] for name in packed}


def _pack_column(
    column: Array, tokens: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], sampled: npt.NDArray[np.bool_] | None
) -> PackedColumn:
    bits = column.view(np.int32)
    if column.dtype == tokens.dtype:
        differs = bits[:-1] != tokens[1:]
        differs[offsets[1:-1] - 1] = False  # the last value of a datum is stored: it has no next token
        if not differs.any():
            return PackedColumn("shifted", column[offsets[1:] - 1])
    changes = np.flatnonzero(bits[1:] != bits[:-1])
    if (len(changes) + 1) * LONG_RUN <= len(column):
        starts = np.concatenate([[0], changes + 1])
        return PackedColumn("runs", column[starts], starts)
    if sampled is not None:
        values = column[sampled]
        if np.count_nonzero(values.view(np.int32)) == np.count_nonzero(bits):  # all others are 0
            return PackedColumn("sparse", values)
    return PackedColumn("plain", column)
