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
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import product
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
from trireme.core.refusals import Refusal
from trireme.process.signals import EXIT_CODES
from trireme.tools.plot import draw_knob, knob_text
from trireme.tools.timeline import json_lines

SCHEMAS: dict[str, type[CommonConfig]] = {"rl": Config, "sft": SftConfig}
MODULES = {"rl": "trireme.cli.rl", "sft": "trireme.cli.sft"}
POLL_S = 0.2
LONGEST_NAME = 120
USAGE = """usage: trireme sweep {rl,sft} [@ FILE.toml ...] [--key value ...]
           --grid KEY=VALUE,VALUE [--grid ...] --metric NAME [--window N] [--knob KEY] [--jobs N] [--name NAME]

  --grid      values of a key; several make a grid. A list in JSON where values hold commas: --grid 'env.args=[{}, {}]'
  --metric    column of metrics.jsonl that is compared at the end of each run
  --window    ... as the mean of its last N values (1)
  --knob      key on the horizontal axis of the plot (that of the first --grid)
  --jobs      runs at the same time (1)
  --name      of the sweep's directory in run.output_dir (made from the configuration)

The same command again continues: finished runs are not repeated, others resume from their newest commit."""
FLAGS = {"--grid": "KEY=VALUE", "--metric": "NAME", "--window": "N", "--jobs": "N", "--name": "NAME", "--knob": "KEY"}


@dataclass(frozen=True)
class Request:
    """The sweep that the command line asks for."""

    kind: str  # rl or sft
    base: tuple[str, ...]  # the arguments that all runs have
    grid: Mapping[str, tuple[str, ...]]  # the texts of each key
    metric: str
    window: int
    jobs: int
    name: str | None
    knob: str

    def runs(self) -> dict[str, dict[str, str]]:
        """Returns every combination, text by key, by the name of its directory. The last key changes fastest."""
        short = {key: key.rpartition(".")[2] for key in self.grid}
        if len(set(short.values())) < len(short):
            short = {key: key for key in short}
        points = [dict(zip(self.grid, texts, strict=True)) for texts in product(*self.grid.values())]
        return {_name(",".join(f"{short[key]}={text}" for key, text in point.items())): point for point in points}


def _name(whole: str) -> str:
    """Names a directory: the readable part of `whole`, and a hash where that leaves something out."""
    plain = re.sub(r"[^\w.,=+-]", "_", whole)
    return plain if plain == whole and len(plain) <= LONGEST_NAME else f"{plain[:LONGEST_NAME]}-{_digest(whole)}"


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=4).hexdigest()


def read_request(kind: str, words: Sequence[str]) -> Request:
    """Takes the sweep's own options out of a command line; the rest is that of each run. Raises BadInput."""
    given: dict[str, list[str]] = {option: [] for option in FLAGS}
    base: list[str] = []
    left = list(words)
    while left:
        option, equals, value = left.pop(0).partition("=")
        if option not in FLAGS:
            base.append(option + equals + value)
        elif equals or left:
            given[option].append(value if equals else left.pop(0))
        else:
            raise Refusal(f"`{option}` without a value", f"`{option} {FLAGS[option]}`", "add it").error()
    if not given["--grid"] or not given["--metric"]:
        raise Refusal(
            f"a sweep without {'--grid' if given['--metric'] else '--metric'}",
            "at least one --grid KEY=VALUE,VALUE and the --metric to compare",
            f"for example: trireme sweep {kind} @ FILE.toml --grid seed=0,1 "
            f"--metric {'reward/total' if kind == 'rl' else 'test/nll'}",
        ).error()
    grid = dict(map(_read_grid, given.pop("--grid")))
    for option, values in given.items():
        if len(values) > 1:
            raise Refusal(f"{option} {' and '.join(values)}", "one of them", "leave the others out").error()
    one = {option: values[0] for option, values in given.items() if values}
    knob = one.get("--knob", next(iter(grid)))
    if knob not in grid:
        raise Refusal(f"--knob {knob}", f"one of the grid's: {', '.join(grid)}", "correct it").error()
    numbers = {option: one.get(option, "1") for option in ("--window", "--jobs")}
    for option, text in numbers.items():
        if not text.isdigit() or int(text) < 1:
            raise Refusal(f"{option} {text}", "a whole number of at least 1", "correct it").error()
    window, jobs = map(int, numbers.values())
    return Request(kind, tuple(base), grid, one["--metric"], window, jobs, one.get("--name"), knob)


def _read_grid(text: str) -> tuple[str, tuple[str, ...]]:
    """Reads `KEY=VALUE,VALUE,...`, or `KEY=[...]`, a list in JSON.

    >>> _read_grid("trainer.learning-rate=1e-4,2e-4")
    ('trainer.learning_rate', ('1e-4', '2e-4'))
    """
    key, _, listed = text.partition("=")
    texts = [part.strip() for part in listed.split(",")]
    if listed.startswith("["):
        values = _value(listed)
        if not isinstance(values, list):
            raise Refusal(f"the values {listed}", "a list in JSON", "correct it").error()
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if not key or not texts or not all(texts):
        raise Refusal(f"--grid {text}", "a key and its values: KEY=VALUE,VALUE,...", "correct it").error()
    if len(set(texts)) < len(texts):
        raise Refusal(f"--grid {text}", "each value once", "leave the others out").error()
    return key.removeprefix("--").replace("-", "_"), tuple(texts)


def _value(text: str) -> Any:
    """Returns a value as it is compared and drawn: a number where it is one.

    >>> _value("1e-4"), _value("cosine")
    (0.0001, 'cosine')
    """
    try:
        return json.loads(text)
    except ValueError:
        return text


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
        ended = {None: "not run", EXIT_OK: "done"}
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
        name = request.name or f"sweep-{config.label}-{_digest(json.dumps(known, sort_keys=True))}"
        sweep = cls(request, Path(config.run.output_dir).expanduser().absolute() / name)
        sweep._claim(known)
        file = sweep.root / "results.json"
        before = {values["name"]: Result(**values) for values in json.loads(file.read_bytes())} if file.exists() else {}
        for name, texts in runs.items():
            values = {key: _value(text) for key, text in texts.items()}
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
        _write(file, json.dumps(known, indent=1))

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Returns the rows of a run's metrics."""
        return list(json_lines(self.root / name / "metrics.jsonl"))

    def metric(self, name: str) -> float | None:
        """Returns the metric at the end of a run; None where no row has it."""
        found = [v for row in self.rows(name) if isinstance(v := row.get(self.request.metric), int | float)]
        return mean(found[-self.request.window :]) if found else None

    def tabulate(self) -> None:
        """Writes table and plot of all results so far."""
        metrics = {name: self.metric(name) for name in self.results}
        lines = [
            {
                **{key: knob_text(result.values[key]) for key in self.request.grid},
                self.request.metric: "" if (metric := metrics[name]) is None else f"{metric:.6g}",
                "steps": str(next((row["version"] for row in reversed(self.rows(name))), 0)),
                "seconds": f"{result.seconds:.0f}",
                "state": result.state,
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
    code = run_all(sweep, partial(print, flush=True))
    sweep.tabulate()
    print((sweep.root / "table.md").read_text(), *(str(file) for file in sorted(sweep.root.glob("*.*"))), sep="\n")
    return code


def run_all(sweep: Sweep, say: Callable[[str], None]) -> int:
    """Runs what is not done yet, each run in a process of its own, at most `jobs` at a time; returns the exit code.

    A run that fails is recorded, and the others continue. Runs have deadlines of their own, so the sweep has none.
    """
    runs = sweep.request.runs()
    waiting = [name for name in runs if sweep.results[name].code != EXIT_OK]
    active: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
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
            time.sleep(POLL_S)
    if stopped_by:
        return stopped_by[-1]
    return EXIT_OK if all(result.code == EXIT_OK for result in sweep.results.values()) else EXIT_FAILED


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
    sweep.results[name] = result = replace(sweep.results[name], code=code, seconds=seconds, error=error)
    _write(sweep.root / "results.json", json.dumps([asdict(each) for each in sweep.results.values()], indent=1))
    sweep.tabulate()
    metric, wanted = sweep.metric(name), sweep.request.metric
    found = "" if metric is None else f", {wanted} {metric:.4g}"
    if metric is None and (names := {column for row in sweep.rows(name) for column in row}):
        near = difflib.get_close_matches(wanted, names, n=3)
        found = f"; none of its rows has {wanted}" + (f" (there is {', '.join(near)})" if near else "")
    say(f"{name}: {result.state} after {seconds:.0f} s{found}")


def last_error(log: str) -> str:
    """Returns the last error that a run printed, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]
