"""`trireme sweep`: a grid of overrides, a run for each point, a table and a plot of the results.

<output_dir>/<name>/
    sweep.json       what all runs have in common: the same command again continues the sweep, another one is refused
    results.json     how each run ended; one that did not end with code 0 is tried again, from its newest commit
    <run>/           the run's own directory
    logs/<run>.log   what it printed
    table.md, table.csv, plot.svg
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from types import FrameType
from typing import Any

from trireme.checkpoint.files import replace_file, storage_errors
from trireme.checkpoint.resume import differences
from trireme.config import CommonConfig, Config
from trireme.config.keys import keys_of
from trireme.config.load import load_as
from trireme.config.sft import SftConfig
from trireme.core.errors import EXIT_FAILED, EXIT_OK
from trireme.core.extras import require
from trireme.core.finite_json import to_json
from trireme.core.refusals import Refusal
from trireme.process.signals import EXIT_CODES
from trireme.tools.plot import draw_knob, knob_text
from trireme.tools.sweep_request import DRY_RUN, USAGE, Request, read_request, short_digest, value_of
from trireme.tools.timeline import json_lines

SCHEMAS: dict[str, type[CommonConfig]] = {"rl": Config, "sft": SftConfig}
MODULES = {"rl": "trireme.cli.rl", "sft": "trireme.cli.sft"}
POLL_S = 0.2
DONE = "done"
PROGRESS_S = 30.0
"""Seconds between lines about a run that is running."""


@dataclass(frozen=True)
class Result:
    """How a run ended, and what its metrics say."""

    name: str
    values: Mapping[str, Any]  # of the grid's keys
    code: int | None = None  # its exit code; None: it has not ended yet
    seconds: float = 0.0  # that its last attempt took
    error: str = ""  # its last words if it failed

    @property
    def state(self) -> str:
        ended = {None: "not run", EXIT_OK: DONE}
        return ended.get(self.code, f"exit code {self.code}" + (f": {self.error}" if self.error else ""))


@dataclass
class Sweep:
    """A sweep in its directory `root`. `results` are in the order of the grid."""

    request: Request
    root: Path
    results: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def open(cls, request: Request) -> Sweep:
        """Checks every point of the grid, and reads what the same sweep did before. Raises BadInput."""
        require("matplotlib", extra="plot", what_for="the plot of a sweep")
        runs = request.runs()
        config, shared = _common(request, runs.values())
        known = {"command": request.kind, "config": shared}
        if config.run.url:
            raise Refusal(
                f"a sweep with run.output_dir = {config.run.output_dir}",
                "a directory: table and plot of a sweep are made from the runs beside them",
                "give another --run.output-dir",
            ).error()
        name = request.name or f"sweep-{config.label}-{short_digest(to_json(known, sort_keys=True))}"
        sweep = cls(request, Path(config.run.output_dir).expanduser().absolute() / name)
        if not request.dry_run:
            sweep._claim(known)
        file = sweep.root / "results.json"
        before = {values["name"]: Result(**values) for values in json.loads(file.read_bytes())} if file.exists() else {}
        for name, texts in runs.items():
            values = {key: value_of(text) for key, text in texts.items()}
            sweep.results[name] = before.get(name, Result(name, values))
        return sweep

    def _claim(self, known: Mapping[str, Any]) -> None:
        file = self.root / "sweep.json"
        if file.exists():
            if changed := differences(json.loads(file.read_bytes()), known, "before"):
                raise Refusal(
                    f"the sweep {self.root}, begun with other values:\n    " + "\n    ".join(changed),
                    "the same command, or one with more values in its --grid",
                    "choose another --name, or give the values of before",
                ).error()
        elif self.root.is_dir() and any(self.root.iterdir()):
            raise Refusal(f"{self.root}, which holds no sweep", "a new directory", "choose another --name").error()
        (self.root / "logs").mkdir(parents=True, exist_ok=True)
        _write(file, to_json(known, indent=1))

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Returns the rows of a run's metrics."""
        return list(json_lines(self.root / name / "metrics.jsonl"))

    def metric(self, name: str) -> float | None:
        """Returns the metric at the end of a run; None where no row has it."""
        found = [v for row in self.rows(name) if isinstance(v := row.get(self.request.metric), int | float)]
        return mean(found[-self.request.window :]) if found else None

    def state(self, name: str) -> str:
        """Returns how a run ended, in words; of one without the metric, which names its rows have instead."""
        if self.results[name].code != EXIT_OK or self.metric(name) is not None:
            return self.results[name].state
        columns = {column for row in self.rows(name) for column, value in row.items() if isinstance(value, int | float)}
        near = difflib.get_close_matches(self.request.metric, columns, n=3) or sorted(columns)
        return f"no such metric: no row has {self.request.metric}, but there is {', '.join(near) or 'none'}"

    def tabulate(self) -> None:
        """Writes table and plot of all results so far."""
        metrics = {name: self.metric(name) for name in self.results}
        lines = [
            {
                **{key: knob_text(result.values[key]) for key in self.request.grid},
                self.request.metric: "" if (metric := metrics[name]) is None else f"{metric:.6g}",
                "steps": str(next((row["version"] for row in reversed(self.rows(name))), 0)),
                "seconds": f"{result.seconds:.0f}",
                "state": self.state(name),
                "run": name,
            }
            for name, result in self.results.items()
        ]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        _write(self.root / "table.csv", text.getvalue())
        window = f", mean of the last {self.request.window} values" if self.request.window > 1 else ""
        table = [list(lines[0]), *([cell.replace("|", "\\|") for cell in line.values()] for line in lines)]
        head, *rows = ("| " + " | ".join(cells) + " |" for cells in table)
        about = f"`{self.request.metric}` at the end of each run{window}."
        _write(self.root / "table.md", "\n".join([about, "", head, "|" + "---|" * len(lines[0]), *rows, ""]))
        if points := [(self.results[name].values, found) for name, found in metrics.items() if found is not None]:
            _write(self.root / "plot.svg", draw_knob(points, knob=self.request.knob, metric=self.request.metric))


def _common(request: Request, points: Iterable[Mapping[str, str]]) -> tuple[CommonConfig, dict[str, Any]]:
    """Returns the configuration of the first run, and what all runs share. Raises BadInput for a point of the grid that
    cannot be read."""
    schema = SCHEMAS[request.kind]
    known, paths = keys_of(schema), []
    for key in request.grid:
        if (path := known.stored_path(tuple(key.split(".")))) is None:
            near = known.nearest(tuple(key.split(".")))
            meant = f"did you mean {'.'.join(near)}? " if near else ""
            raise Refusal(f"--grid {key}=...", "a known key", f"{meant}{known.help}").error()
        paths.append(path)
    configs = [load_as(schema, [*request.base, *_flags(texts)]).config for texts in points]
    config = configs[0]
    if config.resume.wanted or config.clean:
        raise Refusal("--resume or --clean for a sweep", "neither", "run the same sweep again: it continues").error()
    shared: Any = config.model_dump(mode="json", exclude={"run"})
    for path in paths:
        section = shared
        for name in path[:-1]:
            section = section[int(name) if isinstance(section, list) else name]
        section.pop(path[-1], None)
    return config, shared


def _write(file: Path, content: str | bytes) -> None:
    with storage_errors(file):
        replace_file(file, content.encode() if isinstance(content, str) else content)


def main(words: Sequence[str]) -> int:
    """Runs `trireme sweep` with the words behind it, and returns its exit code. Raises BadInput, StorageFailed."""
    if not words or "--help" in words or "-h" in words:
        print(USAGE)
        return EXIT_OK
    if words[0] not in MODULES:
        raise Refusal(f"trireme sweep {words[0]}", f"one of {', '.join(MODULES)}", USAGE).error()
    sweep = Sweep.open(read_request(words[0], words[1:]))
    if sweep.request.dry_run:
        return _show(sweep)
    code = run_all(sweep, partial(print, flush=True))
    sweep.tabulate()
    print((sweep.root / "table.md").read_text(), *(str(file) for file in sorted(sweep.root.glob("*.*"))), sep="\n")
    return code


def _show(sweep: Sweep) -> int:
    """Prints the runs of the grid and the plan of the first; returns the exit code of that."""
    runs = sweep.request.runs()
    states = {name: sweep.results[name].state for name in runs}
    print(f"{sweep.root}: {len(runs)} runs", *(f"  {name}: {state}" for name, state in states.items()), sep="\n")
    print("the plan of the first:", flush=True)
    first = [*sweep.request.base, *_flags(next(iter(runs.values()))), DRY_RUN]
    return subprocess.run([sys.executable, "-m", MODULES[sweep.request.kind], *first]).returncode


def run_all(sweep: Sweep, say: Callable[[str], None]) -> int:
    """Runs what is not done yet, each run in a process of its own, at most `jobs` at a time; returns the exit code.

    A run that fails is recorded, and the others continue. Runs have deadlines of their own, so the sweep has none.
    """
    runs = sweep.request.runs()
    waiting = [name for name in runs if sweep.results[name].code != EXIT_OK]
    active: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    said_at = time.monotonic()
    say(f"{sweep.root}: {len(runs)} runs, {len(runs) - len(waiting)} done")
    with _signals(active) as stopped_by:
        while active or (waiting and not stopped_by):
            while waiting and len(active) < sweep.request.jobs and not stopped_by:
                name = waiting.pop(0)
                active[name] = _start(sweep, name, _flags(runs[name])), time.monotonic()
                say(f"{name}: started; its output: {sweep.log(name)}")
            for name in [name for name, (process, _) in active.items() if process.poll() is not None]:
                process, started = active.pop(name)
                _record_end(sweep, name, process.returncode, time.monotonic() - started, say)
            if time.monotonic() - said_at > PROGRESS_S:
                said_at = time.monotonic()
                for name, (_, started) in active.items():
                    say(f"{name}: {_last_line(sweep.log(name))} ({said_at - started:.0f} s)")
            time.sleep(POLL_S)
    if stopped_by:
        return stopped_by[-1]
    return EXIT_OK if all(sweep.state(name) == DONE for name in runs) else EXIT_FAILED


def _last_line(log: Path) -> str:
    """Returns the newest line that a run printed."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "nothing printed yet")


@contextmanager
def _signals(active: Mapping[str, tuple[subprocess.Popen[bytes], float]]) -> Iterator[list[int]]:
    """Passes each signal on to the active runs, which commit and end; the list is given the exit code of each."""
    codes: list[int] = []

    def note(signum: int, _frame: FrameType | None) -> None:
        codes.append(EXIT_CODES[signal.Signals(signum)])
        for process, _ in active.values():
            if process.poll() is None:
                process.send_signal(signum)

    before = {each: signal.signal(each, note) for each in EXIT_CODES}
    try:
        yield codes
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _flags(texts: Mapping[str, str]) -> list[str]:
    return [word for key, text in texts.items() for word in (f"--{key}", text)]


def _start(sweep: Sweep, name: str, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a run, which resumes if it was begun before."""
    place = ["--run.output-dir", str(sweep.root), "--run.name", name]
    begun = ["--resume"] if (sweep.root / name / "config.json").exists() else []
    kind, base = sweep.request.kind, sweep.request.base
    command = [sys.executable, "-m", MODULES[kind], *base, *place, *flags, *begun]
    with storage_errors(sweep.log(name)), sweep.log(name).open("ab") as log:
        # A session of its own: Ctrl-C reaches the sweep alone, which passes it on once.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _record_end(sweep: Sweep, name: str, code: int, seconds: float, say: Callable[[str], None]) -> None:
    """Stores and says how a run ended, and draws all results so far."""
    error = "" if code == EXIT_OK else last_error(sweep.log(name).read_text(errors="replace"))
    sweep.results[name] = replace(sweep.results[name], code=code, seconds=seconds, error=error)
    _write(sweep.root / "results.json", to_json([asdict(each) for each in sweep.results.values()], indent=1))
    sweep.tabulate()
    found = "" if (metric := sweep.metric(name)) is None else f", {sweep.request.metric} {metric:.4g}"
    say(f"{name}: {sweep.state(name)} after {seconds:.0f} s{found}")


def last_error(log: str) -> str:
    """Returns the last error that a run printed, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]
