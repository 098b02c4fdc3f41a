"""Reads and writes row files: text files with one JSON object per line, where every line belongs to one step. Going
back to a checkpoint moves the rows of later steps to another file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.checkpoint.files import make_directory, replace_file

METRICS = "metrics.jsonl"
TRAINED = "trained.jsonl"
ROLLOUTS = "rollouts"
"""Directory with a file of rollouts for each step that records some."""
ROW_FILES = (METRICS, TRAINED)
"""Row files of a run: METRICS has the metrics of each step, and TRAINED its problems (so the order of the data). Going
back to the checkpoint of step N removes the rows from N on from both."""


@dataclass(frozen=True)
class StepRow:
    """One line of a row file."""

    line: bytes  # the text as written, with its end of line
    values: Mapping[str, Any]  # the JSON object

    @property
    def step(self) -> int:
        return int(self.values["step"])


def shown_step(row: Mapping[str, Any]) -> int:
    """Returns the number of a row's step as people see it, counted from 1: the checkpoint after the step has the same
    number. (The row itself counts from 0: it holds the version that was trained on.)"""
    return int(row["step"]) + 1


def _row(line: bytes) -> StepRow | None:
    with suppress(ValueError, TypeError, KeyError):
        values = json.loads(line)
        if isinstance(values["step"], int):
            return StepRow(line.rstrip(b"\n") + b"\n", values)
    return None


def read_rows(file: Path) -> tuple[list[StepRow], int]:
    """Returns the rows of `file`, and the number of torn lines (incomplete or no valid row). A missing file has no
    rows."""
    if not file.exists():
        return [], 0
    rows = [_row(line) for line in file.read_bytes().splitlines(keepends=True)]
    whole = [row for row in rows if row is not None]
    return whole, len(rows) - len(whole)


def write_rows(file: Path, rows: list[StepRow]) -> None:
    """Replaces the contents of `file` by `rows` atomically (`replace_file`). Raises OSError."""
    replace_file(file, b"".join(row.line for row in rows))


def move_rows(file: Path, leaves: Callable[[StepRow], bool], branch_file: Path) -> tuple[int, int]:
    """Moves the rows of `file` for which `leaves` returns True to the end of `branch_file`, and drops torn lines.
    Returns the number of moved rows and the number of torn lines.

    A crash at any point leaves each row in at least one of the files; another call completes the move. `file` is
    replaced: a process that still has the old file open does not write to the new one. Raises OSError.
    """
    rows, torn = read_rows(file)
    leaving = [row for row in rows if leaves(row)]
    if leaving:
        make_directory(branch_file.parent)
        existing, _ = read_rows(branch_file)
        lines = {row.line for row in existing}
        write_rows(branch_file, [*existing, *(row for row in leaving if row.line not in lines)])
    if file.exists():
        write_rows(file, [row for row in rows if not leaves(row)])
    return len(leaving), torn


def attempts_before(root: Path, step: int) -> list[tuple[int, int]]:
    """Returns (attempt, its first step) for each attempt of the run in `root` that trained a step before `step`, in
    order of attempt. Reads the rows of metrics.jsonl."""
    starts: dict[int, int] = {}
    for row in read_rows(root / METRICS)[0]:
        if row.step < step:
            attempt = int(row.values["attempt"])
            starts[attempt] = min(starts.get(attempt, row.step), row.step)
    return sorted(starts.items())


def recorded_steps(directory: Path) -> dict[int, Path]:
    """Returns {step: file} for the files step_<number>.jsonl of recorded rollouts in `directory`, in order of step."""
    names = {file: re.fullmatch(r"step_(\d{6,})\.jsonl", file.name) for file in directory.glob("*.jsonl")}
    return dict(sorted((int(match[1]), file) for file, match in names.items() if match))
