"""Files of one JSON object per line and step. The rows after a commit move away when a run goes back to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.checkpoint.files import make_directory, replace_file

ROW_FILES = ("metrics.jsonl", "trained.jsonl")
"""StepRow files of a run that a commit of step N cuts at row N."""


@dataclass(frozen=True)
class StepRow:
    """`line` is the text that was written, with its end of line; `values` what it says."""

    line: bytes
    values: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.values["step"])


@dataclass(frozen=True)
class Cut:
    """How many rows were moved, and how many lines were no rows (torn by a crash) and are gone."""

    moved: int
    torn: int


def _row(line: bytes) -> StepRow | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        return None
    return StepRow(line.rstrip(b"\n") + b"\n", values)


def read_rows(file: Path) -> tuple[list[StepRow], int]:
    """The rows of `file`, and the number of lines that are none (a torn last one). No file has no rows."""
    if not file.exists():
        return [], 0
    rows = [_row(line) for line in file.read_bytes().splitlines(keepends=True)]
    whole = [row for row in rows if row is not None]
    return whole, len(rows) - len(whole)


def write_rows(file: Path, rows: list[StepRow]) -> None:
    """Makes `rows` the contents of `file`, at once. Raises OSError."""
    replace_file(file, b"".join(row.line for row in rows))


def cut(file: Path, goes: Callable[[StepRow], bool], branch_file: Path) -> Cut:
    """Moves the rows of `file` that `goes` is true of to the end of `branch_file`; lines that are no rows are dropped.

    A crash at any point leaves every row in at least one of the two, and another call makes it exactly one. Raises
    OSError.
    """
    rows, torn = read_rows(file)
    leaving = [row for row in rows if goes(row)]
    if leaving:
        make_directory(branch_file.parent)
        there, _ = read_rows(branch_file)
        lines = {row.line for row in there}
        write_rows(branch_file, [*there, *(row for row in leaving if row.line not in lines)])
    if leaving or torn:
        write_rows(file, [row for row in rows if not goes(row)])
    return Cut(len(leaving), torn)
