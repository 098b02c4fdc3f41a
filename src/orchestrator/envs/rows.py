"""Problems in files: rows of JSONL and parquet files, on this machine or on the hub, and datasets of such problems.

    train.jsonl    data/*.parquet    hf://datasets/openai/gsm8k/main/train-*.parquet

`hf://` paths have the form that pandas and others accept. Their files are fetched once, into the cache of the hub's
client, with that client's token for private files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from glob import glob
from pathlib import Path
from typing import Any, Generic, TypeVar

from orchestrator.env import EnvContext, EnvGroupBuilder, RLDataset
from orchestrator.envs.text import is_held_out
from trireme.core.extras import require

HUB = "hf://datasets/"

P = TypeVar("P")


class ListedDataset(RLDataset, Generic[P]):
    """A dataset of the problems in the list `problems`, in an order that follows from `seed`, with `batch_size`
    problems in a batch. `make` returns the builder of a problem. Raises ValueError for a batch size below 1."""

    def __init__(self, make: Callable[[P], EnvGroupBuilder], problems: list[P], seed: str, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size}; expected at least 1")
        random.Random(seed).shuffle(problems)
        self._make = make
        self._problems = problems
        self._batch_size = batch_size

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        first = index * self._batch_size
        return [self._make(problem) for problem in self._problems[first : first + self._batch_size]]

    def __len__(self) -> int:
        return -(-len(self._problems) // self._batch_size)


def problems_of_split(
    context: EnvContext, path: str, eval_path: str | None, read: Callable[[str, object], tuple[str, P]]
) -> list[P]:
    """Returns the problems of the context's split, in the order of the files.

    `read` takes two arguments: a text that says where a row is, for error messages, and the row's value. It returns the
    text of the question, and the problem. The split `eval` has the rows of `eval_path`. Without `eval_path`, it has
    about an eighth of the rows of `path`, chosen by the question's text, and training leaves these rows out. Raises
    ValueError if no problem is left, and errors of `read`.
    """
    if eval_path and context.split == "eval":
        source = eval_path
    else:
        source = path
    problems = [read(place, row) for place, row in read_rows(source)]
    if eval_path is None:
        problems = [pair for pair in problems if is_held_out(pair[0]) == (context.split == "eval")]
    if not problems:
        raise ValueError(f"{source} has no question for the split {context.split!r}")
    return [problem for _, problem in problems]


def read_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yields a pair for each row of the files that `path` names: a text that says where the row is, for error messages,
    and the row's value. `path` may be a pattern, or an `hf://` path. Raises ValueError for a missing file and for a
    line that is not JSON, and BadInput if a package is missing."""
    for file in _files(path):
        if file.suffix == ".parquet":
            parquet = require("pyarrow.parquet", extra="parquet", what_for=f"the parquet file {file}")
            for number, row in enumerate(parquet.read_table(file).to_pylist(), 1):
                yield f"row {number} of {file}", row
        else:
            yield from _json_rows(file)


def _files(path: str) -> list[Path]:
    """Returns the files that `path` names, in the order of their names; at least one."""
    if path.startswith(HUB):
        from huggingface_hub import snapshot_download

        owner, name, pattern = path.removeprefix(HUB).split("/", 2)
        path = str(Path(snapshot_download(f"{owner}/{name}", repo_type="dataset", allow_patterns=pattern), pattern))
    exact = Path(path).expanduser()
    if exact.is_file():
        files = [exact]
    else:
        files = [Path(match) for match in sorted(glob(str(exact)))]
    if not files:
        raise ValueError(f"there is no file {exact.absolute()}")
    return files


def _json_rows(file: Path) -> Iterator[tuple[str, object]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            place = f"line {number} of {file}"
            try:
                if line.strip():
                    yield place, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place} is no JSON: {error}") from None
