"""Reduces the metrics of a step to one row, and writes the rows. All readers take the rows from `metrics.jsonl`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from trireme.checkpoint.files import storage_errors
from trireme.checkpoint.rows import METRICS, ROLLOUTS, TRAINED, shown_step
from trireme.core.errors import DiskFull, StorageFailed
from trireme.core.finite_json import to_json
from trireme.core.paths import path_in
from trireme.core.refusals import Refusal
from trireme.process import trace
from trireme.process.faults import fault_point
from trireme.run.checkpoints import Checkpoints
from trireme.run.rollout_records import write_records
from trireme.run.sink import MetricsSink

TOO_EASY = 0.8
"""If more than this share of the problems is always solved at the start, there is little left to learn."""
_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {"sum": sum, "max": max, "min": min}


def reduce_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Reduces the metrics of several micro-batches, shards or minibatches to one dict. The suffix of a metric's name
    says how: `:sum`, `:max`, `:min` or `:mean`. A mean weights each part by its `loss_tokens:sum` (1 if the part has no
    such metric). If all these are 0, the parts have equal weights.

    >>> reduce_metrics([{"loss:sum": 1.0, "ratio:max": 2.0}, {"loss:sum": 3.0, "ratio:max": 1.5}])
    {'loss:sum': 4.0, 'ratio:max': 2.0}

    Raises KeyError for a name with another suffix.
    """
    reduced = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        having = [part for part in parts if name in part]
        how = name.rpartition(":")[2]
        values = [part[name] for part in having]
        if how == "mean":
            tokens = [part.get("loss_tokens:sum", 1.0) for part in having]
            reduced[name] = fmean(values, tokens if any(tokens) else None)
        else:
            reduced[name] = float(_REDUCTIONS[how](values))
    return reduced


class Clock:
    """Measures the seconds spent in the named parts of a step: `with clock(name):`. Each part is also a span of the
    trace."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, **args: Any) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with trace.span(name, **args):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def timed(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        """Yields the items of `items`, and adds the seconds of waiting for each item to `seconds[name]`."""
        end = object()
        while True:
            with self(name):
                item = next(items, end)
            if item is end:
                return
            yield item


class Journal:
    """Writes the results of each step of the run in `root`. The metrics go to metrics.jsonl, to `sinks`, and to `out`
    as the text that `line(row)` returns; a list of what the step trained on goes to trained.jsonl, and records of some
    rollouts go to `rollouts/`. `checkpoints` makes room on a full disk. Close the journal at the end, as `closing`
    does."""

    def __init__(
        self,
        root: Path,
        line: Callable[[Mapping[str, object]], str],
        out: TextIO,
        sinks: Sequence[MetricsSink],
        checkpoints: Checkpoints,
    ) -> None:
        self._root = root
        self._line = line
        self._out = out
        self._sinks = sinks
        self._checkpoints = checkpoints
        self._files = {name: path_in(root, name).open("ab", buffering=0) for name in (METRICS, TRAINED)}

    def write(self, row: Mapping[str, Any], trained: Mapping[str, Any], records: Sequence[str] = ()) -> None:
        """Writes the results of one step. `row` has the metrics; `trained` has, under the key `groups` or `examples`,
        what was trained on; `records` has a JSON text for each recorded group. On return all files are written, but not
        fsynced: a crash of this process loses no line, a crash of the machine may. If the disk is full, deletes old
        checkpoints and tries again. Raises StorageFailed if that also fails, or if a write fails for another reason.
        Also raises LockLost and RoomFailed."""
        self._checkpoints.check_owner()
        self._with_room(partial(self._append, TRAINED, {"step": row["step"], "attempt": row["attempt"], **trained}))
        self._with_room(partial(write_records, self._root / ROLLOUTS, row["step"], records))
        self._with_room(partial(self._append, METRICS, row))
        print(self._line(row), file=self._out, flush=True)
        for sink in self._sinks:
            sink.write(row, records)

    def _append(self, name: str, row: Mapping[str, object]) -> None:
        """Adds `row` as a line to the file `name`. If the write fails, removes the partial line, which would spoil the
        next one, and raises the OSError."""
        file = self._files[name]
        line = memoryview(to_json(row).encode() + b"\n")
        whole = os.fstat(file.fileno()).st_size
        try:
            fault_point(f"row.{name}")
            while line:
                line = line[file.write(line) :]
        except OSError:
            file.truncate(whole)
            raise

    def _with_room(self, write: Callable[[], None]) -> None:
        """Calls `write`. If the disk is full, makes room and calls `write` once more. Raises StorageFailed if that also
        fails, or if the first call fails for another reason. Also raises the errors of `Checkpoints.make_room`."""
        try:
            with storage_errors(self._root):
                write()
            return
        except DiskFull:
            self._checkpoints.make_room()
        try:
            with storage_errors(self._root):
                write()
        except StorageFailed as error:
            refusal = Refusal(
                f"the rows of a step, for which {self._root} has no room: {error}",
                "room for the newest checkpoint, and for some kilobytes in each step",
                "make room, then resume: a step without its rows is no part of a run",
            )
            raise StorageFailed(str(refusal)) from error

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def evaluation_text(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line of text for each evaluation in `row`, the metrics of a step. At version 0 a warning follows if the
    problems are too hard or too easy to learn from."""
    places = [name.removesuffix("version") for name in row if name.startswith("eval/") and name.endswith("/version")]
    for place in places:
        version, n, failed = (int(row[place + name]) for name in ("version", "n", "failed"))
        kinds = (f"{place}avg@", f"{place}pass@")
        means = [name for name in row if name.startswith(kinds) and not name.endswith("/ci95")]
        parts = [f"{name.removeprefix(place)} {row[name]:.3f} +- {row.get(f'{name}/ci95', 0.0):.3f}" for name in means]
        if failed:
            parts.append(f"{failed} rollouts failed ({failed / (n + failed):.0%}) and count nowhere")
        yield f"  evaluation of version {version} on {place.split('/', 1)[1][:-1]}: {', '.join(parts)}"
        all_bad, all_good = (row.get(f"{place}by_group/frac_all_{kind}", 0.0) for kind in ("bad", "good"))
        if version == 0 and (all_bad == 1 or all_good > TOO_EASY):
            yield (
                f"  warning: of these problems {all_bad:.0%} are never solved at the start, and {all_good:.0%} always. "
                "Little can be learnt where all rollouts of a problem are alike: choose problems that are solved "
                "sometimes"
            )


def step_line(row: Mapping[str, Any], max_steps: int) -> str:
    """Returns the text that the terminal shows for a step of `rl`: a line with metrics of `row`, then the lines of
    `evaluation_text`."""
    return "\n".join(
        [
            f"step {shown_step(row):>{len(str(max_steps))}}/{max_steps}"
            f"  reward {row['reward/total']:.3f}"
            f"  age {row['off_policy/mean']:.2f} (max {row['off_policy/max']:.0f})"
            f"  kl {row['optim/kl_sample_train_v2']:.1e}"
            f"  {row['perf/tokens_per_s']:>6.0f} tokens/s"
            f"  {row['time/step']:.2f} s = wait {row['time/wait_for_batch']:.2f}"
            f" + train {row['time/forward_backward'] + row['time/optim']:.2f}"
            f" + publish {row['time/publish']:.2f}"
            f" + update {row['time/update_replicas'] + row.get('time/hand_over', 0.0):.2f}",
            *evaluation_text(row),
        ]
    )
