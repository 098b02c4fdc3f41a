"""Results of evaluations in a run directory: `evaluations/step_000040-1f3a5c7e.json`, one for each checkpoint and set
of options. `trireme eval` writes them, takes them up again with --resume, and compares them. Until an evaluation has
ended, `step_000040-1f3a5c7e.groups.jsonl` holds the problems that have been evaluated: a line for each, as
`orchestrator.evaluation` writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from rich.table import Table

from trireme.checkpoint.files import replace_file, storage_errors
from trireme.checkpoint.store import KEEP
from trireme.config import Config
from trireme.core.finite_json import to_json
from trireme.core.refusals import Refusal
from trireme.core.types import WeightIdentity

DIRECTORY = "evaluations"
MEAN = "avg@"
NO_MATTER: dict[str, Any] = {
    **dict.fromkeys(("checkpoint", "clean", "cluster", "max_steps", "mlflow", "resume", "run", "service"), True),
    **dict.fromkeys(("tensorboard", "timeouts", "trace", "trackio", "trainer", "wandb"), True),
    "inference": {"replicas"},
    "model": {"name"},
}
"""{section or key: True for all of it, or the names of keys in the section} of what changes neither problems nor
samples of an evaluation. The model's name is among it because the checkpoint takes the place of the model."""


@dataclass(frozen=True)
class Evaluations:
    """The evaluation results that are stored in one run directory, for one set of evaluation options."""

    directory: Path
    options: str
    """A hash, 32 hex digits, of the configuration without the keys in NO_MATTER."""

    @classmethod
    def of(cls, run: Path, config: Config) -> Evaluations:
        """Returns the stored results in the run directory `run` for the evaluation options in `config`."""
        options = config.model_dump_json(exclude=NO_MATTER)
        return cls(run / DIRECTORY, xxhash.xxh3_128_hexdigest(options.encode()))

    def file(self, identity: WeightIdentity) -> Path:
        """Returns the path for the result of the weights `identity`."""
        number = xxhash.xxh3_64_hexdigest(f"{identity} {self.options}".encode())
        return self.directory / f"step_{identity.version:06d}-{number}.json"

    def has(self, identity: WeightIdentity) -> bool:
        """Returns True if the weights `identity` have been evaluated with these options."""
        return self.file(identity).exists()

    def read(self, identity: WeightIdentity) -> Mapping[str, float]:
        """Returns the metrics of the weights `identity`, which have been evaluated with these options."""
        row: dict[str, float] = json.loads(self.file(identity).read_text())["row"]
        return row

    def write(self, identity: WeightIdentity, row: Mapping[str, float]) -> Path:
        """Writes the metrics of the weights `identity`, and returns the file. Raises StorageFailed."""
        file = self.file(identity)
        values = {"identity": str(identity), "options": self.options, "row": row}
        with storage_errors(file):
            file.parent.mkdir(exist_ok=True)
            replace_file(file, (to_json(values, indent=1) + "\n").encode())
        self.drop_lines(identity)
        return file

    def read_lines(self, identity: WeightIdentity) -> list[str]:
        """Returns the lines that `append_lines` wrote for the weights `identity`. If a kill left the last line
        incomplete, removes it from the file, because the next line would continue it. Raises StorageFailed."""
        file = self._lines_file(identity)
        if not file.exists():
            return []
        with storage_errors(file):
            content = file.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                replace_file(file, whole)
        return whole.decode().splitlines()

    def append_lines(self, identity: WeightIdentity, lines: Sequence[str]) -> None:
        """Appends `lines` to the file of the weights `identity`. Each line is the JSON text of a problem that has been
        evaluated with these weights. Raises StorageFailed."""
        if not lines:
            return
        file = self._lines_file(identity)
        with storage_errors(file):
            file.parent.mkdir(exist_ok=True)
            with file.open("a") as out:
                out.writelines(f"{line}\n" for line in lines)

    def drop_lines(self, identity: WeightIdentity) -> None:
        """Removes the lines that `append_lines` wrote for the weights `identity`. Raises StorageFailed."""
        file = self._lines_file(identity)
        with storage_errors(file):
            file.unlink(missing_ok=True)

    def _lines_file(self, identity: WeightIdentity) -> Path:
        return self.file(identity).with_suffix(".groups.jsonl")


def full_name(metric: str, row: Mapping[str, float]) -> str:
    """Returns the full name of a metric, as `row` has it. `metric`: the name with or without `eval/`. Raises BadInput
    if `row` has no such metric."""
    for name in (metric, f"eval/{metric}"):
        if name in row:
            return name
    means = [name.removeprefix("eval/") for name in row if name.startswith("eval/") and not name.endswith("/ci95")]
    raise Refusal(
        f"--keep-best {metric}, which the evaluation does not have",
        f"one of {', '.join(means)}",
        "correct the name; with --resume no finished evaluation is repeated",
    )


def best(rows: Mapping[str, Mapping[str, float]], metric: str) -> str:
    """Returns the label of the row with the highest `metric`; if several rows tie, the first of them. Raises BadInput
    if no row has the metric, for example because all rollouts failed. `rows`: {label of a checkpoint: its metrics}."""
    having = {label: row[metric] for label, row in rows.items() if metric in row}
    if not having:
        raise Refusal(
            f"--keep-best {metric}, for which no checkpoint has a value",
            "an evaluation with at least one rollout that did not fail",
            "find out why the rollouts failed (`failed` and `errors/...` in the tables of the evaluations), and "
            "evaluate again",
        )
    return max(having, key=having.__getitem__)


def keep(checkpoint: Path, metric: str) -> None:
    """Writes a file KEEP to the directory `checkpoint`, so that its run never deletes the checkpoint. `metric`: the
    metric by which the checkpoint is the best; the file names it. Raises StorageFailed."""
    with storage_errors(checkpoint):
        (checkpoint / KEEP).write_text(f"the best by {metric} of `trireme eval`\n")


def comparison(rows: Mapping[str, Mapping[str, float]], metric: str | None) -> Table:
    """Returns a table with a line for each checkpoint, and a column for each task: the mean reward with its 95 %
    interval. `metric`: the metric whose best value is marked (None: no value is marked); it gets a column if it has
    none."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row if _is_mean(name)))
    if metric and metric not in names:
        names.append(metric)
    shown = Table("checkpoint", *(name.removeprefix("eval/") for name in names), box=None)
    for label, row in rows.items():
        cells = [value_text(row, name) for name in names]
        if metric and label == best(rows, metric):
            cells[names.index(metric)] += " (best)"
        shown.add_row(label, *cells)
    return shown


def value_text(row: Mapping[str, float], name: str) -> str:
    """Returns the metric `name` of `row` as text, with its interval if it has one; `-` if the row lacks it."""
    if name not in row:
        return "-"
    if f"{name}/ci95" in row:
        return f"{row[name]:.4f} +- {row[f'{name}/ci95']:.4f}"
    return f"{row[name]:g}"


def _is_mean(name: str) -> bool:
    return name.startswith("eval/") and MEAN in name.rsplit("/", 1)[-1]
