"""The directory of a sweep: which runs it has, how they ended, what they came to.

<output_dir>/<name>/
    sweep.json       what every run has in common: the same command again goes on, another one is refused
    results.json     how each run ended; one that did not end with code 0 is tried again, from its newest commit
    <run>/           the run's own directory
    logs/<run>.log   what it printed
    table.md, table.csv, plot.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import mean
from typing import Any

from trireme.checkpoint.files import replace_file, storage_errors
from trireme.checkpoint.resume import differences
from trireme.config import CommonConfig, Config
from trireme.config.keys import keys_of
from trireme.config.load import load_as
from trireme.config.refusals import Refusal
from trireme.config.sft import SftConfig
from trireme.tools.sweep.request import Knob, Request, Run, runs_of
from trireme.tools.sweep.table import Outcome, Result, as_csv, markdown, plot
from trireme.tools.timeline import json_lines

SCHEMAS: dict[str, type[CommonConfig]] = {"rl": Config, "sft": SftConfig}
MODULES = {"rl": "trireme.cli.rl", "sft": "trireme.cli.sft"}


@dataclass
class Sweep:
    """A sweep in its directory. `results` in the order of the grid."""

    request: Request
    root: Path
    results: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def open(cls, request: Request) -> Sweep:
        """Checks every point of the grid, and takes up what the same sweep did before. Raises BadInput."""
        runs = runs_of(request.knobs)
        config, shared = _common(request, runs)
        known = {"command": request.kind, "config": shared}
        name = request.name or f"sweep-{config.label}-{_hash(known)}"
        sweep = cls(request, Path(config.run.output_dir).expanduser().absolute() / name)
        sweep._claim(known)
        before = {values["name"]: Result(**values) for values in sweep._recorded()}
        sweep.results = {run.name: before.get(run.name, Result(run.name, run.values)) for run in runs}
        return sweep

    @property
    def runs(self) -> list[Run]:
        return runs_of(self.request.knobs)

    def log(self, run: Run) -> Path:
        return self.root / "logs" / f"{run.name}.log"

    def command(self, run: Run) -> list[str]:
        """The command of a run, which goes on where it stopped if it was begun."""
        place = ["--run.output-dir", str(self.root), "--run.name", run.name]
        begun = ["--resume"] if (self.root / run.name / "config.json").exists() else []
        return [sys.executable, "-m", MODULES[self.request.kind], *self.request.base, *place, *run.flags, *begun]

    def record(self, result: Result) -> None:
        """Keeps how a run ended, and writes table and plot of what is known."""
        self.results[result.name] = result
        write(self.root / "results.json", json.dumps([asdict(each) for each in self.results.values()], indent=1))
        self.tabulate()

    def tabulate(self) -> list[Outcome]:
        """Writes table and plot."""
        outcomes = [self.outcome(result) for result in self.results.values()]
        write(self.root / "table.md", markdown(self.request, outcomes))
        write(self.root / "table.csv", as_csv(self.request, outcomes))
        if any(outcome.metric is not None for outcome in outcomes):
            write(self.root / "plot.svg", plot(self.request, outcomes))
        return outcomes

    def outcome(self, result: Result) -> Outcome:
        rows = self.rows(result.name)
        found = [row[self.request.metric] for row in rows if isinstance(row.get(self.request.metric), int | float)]
        metric = mean(found[-self.request.window :]) if found else None
        return Outcome(result, metric, rows[-1]["version"] if rows else 0)

    def rows(self, name: str) -> list[dict[str, Any]]:
        file = self.root / name / "metrics.jsonl"
        return list(json_lines(file)) if file.exists() else []

    def _claim(self, known: Mapping[str, Any]) -> None:
        file = self.root / "sweep.json"
        if file.exists():
            changed = differences(json.loads(file.read_bytes()), known, "before")
            if changed:
                raise Refusal(
                    f"the sweep {self.root}, begun with other values:\n    " + "\n    ".join(changed),
                    "the same command, or one with more values in its --grid",
                    "choose another --name, or give the values of before",
                ).error()
        elif self.root.is_dir() and any(self.root.iterdir()):
            raise Refusal(f"{self.root}, which holds no sweep", "a new directory", "choose another --name").error()
        (self.root / "logs").mkdir(parents=True, exist_ok=True)
        write(file, json.dumps(known, indent=1))

    def _recorded(self) -> list[dict[str, Any]]:
        file = self.root / "results.json"
        found: list[dict[str, Any]] = json.loads(file.read_bytes()) if file.exists() else []
        return found


def _common(request: Request, runs: Sequence[Run]) -> tuple[CommonConfig, dict[str, Any]]:
    """The configuration of the first run, and what all of them share. Raises BadInput for a point of the grid that
    cannot be read."""
    schema = SCHEMAS[request.kind]
    paths = [_path_of(knob, schema) for knob in request.knobs]
    configs = [load_as(schema, [*request.base, *run.flags]).config for run in runs]
    config = configs[0]
    if config.resume.wanted or config.clean:
        raise Refusal("--resume or --clean for a sweep", "neither", "the same sweep again goes on by itself").error()
    shared = config.model_dump(mode="json", exclude={"run"})
    for path in paths:
        _remove(shared, path)
    return config, shared


def _path_of(knob: Knob, schema: type[CommonConfig]) -> tuple[str, ...]:
    """Where the knob's value is stored. Raises BadInput for an unknown key."""
    known, spelling = keys_of(schema), tuple(knob.key.split("."))
    path = known.stored_path(spelling)
    if path is None:
        near = known.nearest(spelling)
        meant = f"did you mean {'.'.join(near)}? " if near else ""
        raise Refusal(f"--grid {knob.key}=...", "a known key", f"{meant}{known.help}").error()
    return path


def _remove(values: Any, path: Sequence[str]) -> None:
    for name in path[:-1]:
        values = values[int(name) if isinstance(values, list) else name]
    values.pop(path[-1], None)


def _hash(known: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=4).hexdigest()


def write(file: Path, text: str) -> None:
    """Replaces a file. Raises StorageFailed."""
    with storage_errors(file):
        replace_file(file, text.encode())
