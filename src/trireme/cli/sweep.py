"""`trireme sweep`: a run for each point of a grid of overrides, then a table and a plot of the results.

<output_dir>/<name>-<digest of the first run's configuration>/
    sweep.json       how each run ended; the same command again continues, also with more values after the others
    <run>/           the run's own directory; logs/<run>.log has its output
    table.md, plot.svg
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import product
from pathlib import Path
from statistics import mean

from trireme.checkpoint.files import replace_file, storage_errors
from trireme.cli.common import Parser
from trireme.config import CommonConfig, Config
from trireme.config.load import load_as
from trireme.config.sft import SftConfig
from trireme.core.errors import EXIT_FAILED, EXIT_OK
from trireme.core.extras import require
from trireme.core.finite_json import JsonObject, to_json
from trireme.core.own_packages import ENTRY
from trireme.core.refusals import Refusal
from trireme.process.signals import Stop
from trireme.tools.curves import RunCurves
from trireme.tools.plot import draw_knob

SCHEMAS: dict[str, type[CommonConfig]] = {"rl": Config, "sft": SftConfig}
MODULES = {"rl": "trireme.cli.rl", "sft": "trireme.cli.sft"}
POLL_S = 0.2
STOP_S = 3600.0
"""Seconds after a signal in which the runs write a checkpoint and end; their own deadlines are shorter."""
NOT_RUN = {"code": None, "seconds": 0.0, "error": ""}
"""The result of a run before it ends, with the keys of all results: exit code, seconds of the last attempt, and the
error that the run printed."""
MAX_NAME = 120
"""The most characters of a run's name before the hash."""
say = partial(print, flush=True)


class Sweep:
    """A sweep in its directory `root`: the overrides, the command and the result of each run, by the run's name."""

    def __init__(self, options: argparse.Namespace, base: Sequence[str]) -> None:
        """Checks the configuration of every run, and reads the results of an earlier start of the same sweep.
        `options`: the options of the sweep, from `parse`; `base`: the arguments that all runs have. Raises BadInput."""
        require("matplotlib", extra="plot", what_for="the plot of a sweep")
        grid: dict[str, list[str]] = dict(options.grid)
        self.options = options
        self.knob = next(iter(grid))
        points = [dict(zip(grid, texts, strict=True)) for texts in product(*grid.values())]
        self.runs = {name_of(point): point for point in points}
        overrides = {name: [f"--{key}={text}" for key, text in point.items()] for name, point in self.runs.items()}
        self.commands = {name: [*base, *overrides[name]] for name in self.runs}
        config, *_ = [load_as(SCHEMAS[options.kind], command).config for command in self.commands.values()]
        if config.resume.requested or config.clean or config.run.url:
            problem = "--resume, --clean or object storage for a sweep"
            raise Refusal(
                problem,
                "a sweep without any of these",
                "leave them out. To continue a sweep, run the same sweep again: it continues in its directory",
            )
        digest = short_digest(options.kind + to_json(config.model_dump(mode="json", exclude={"run"})))
        self.root = (
            Path(config.run.output_dir).expanduser().absolute() / f"{options.name or f'sweep-{config.label}'}-{digest}"
        )
        file = self.root / "sweep.json"
        if file.exists():
            recorded = json.loads(file.read_bytes())
        else:
            recorded = {}
        self.results: dict[str, JsonObject] = {name: recorded.get(name, NOT_RUN) for name in self.runs}

    def log(self, name: str) -> Path:
        """Returns the path of the file with the output of the run `name`."""
        return self.root / "logs" / f"{name}.log"

    def last_line(self, name: str) -> str:
        """Returns the last error in the output of the run `name`; if there is none, the last line."""
        lines = [line.strip() for line in self.log(name).read_text(errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["nothing printed yet"])[-1]

    def curves(self, name: str) -> RunCurves:
        """Returns all metrics of the run `name`."""
        curves = RunCurves(self.root / name)
        curves.look(most_bytes=None)
        return curves

    def metric(self, name: str) -> float | None:
        """Returns the result of the run `name` in the metric by which the sweep compares its runs: the mean of the
        metric's last `window` values. Returns None if no row of the run has the metric."""
        values = self.curves(name).values(self.options.metric)
        if values:
            return mean(values[-self.options.window :])
        return None

    def state(self, name: str) -> str:
        """Returns how the run `name` ended, in words."""
        result = self.results[name]
        if result["code"] is None:
            return "not run"
        if result["code"] != EXIT_OK:
            return f"exit code {result['code']}: {result['error']}"
        if self.metric(name) is None:
            return f"no row of metrics.jsonl has {self.options.metric}"
        return "done"

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Starts the run `name` in a process of its own, and returns the process. If the run was begun before, resumes
        it."""
        place = ["--run.output-dir", str(self.root), "--run.name", name]
        if (self.root / name / "config.json").exists():
            resume = ["--resume"]
        else:
            resume = []
        command = [sys.executable, "-m", ENTRY, MODULES[self.options.kind], *self.commands[name], *place, *resume]
        with storage_errors(self.log(name)), self.log(name).open("ab") as log:
            # A session of its own: Ctrl-C reaches the sweep alone, which passes it on once.
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def write(self) -> None:
        """Writes all results so far to sweep.json, table.md and plot.svg."""
        lines: list[dict[str, str]] = []
        points: list[tuple[JsonObject, float]] = []
        for name, point in self.runs.items():
            metric = self.metric(name)
            if metric is not None:
                points.append(({key: value_of(text) for key, text in point.items()}, metric))
            line = {**point, self.options.metric: "" if metric is None else f"{metric:.6g}"}
            line["steps"] = str(self.curves(name).newest.get("version", 0))
            line["seconds"] = f"{self.results[name]['seconds']:.0f}"
            lines.append({**line, "state": self.state(name).replace("|", "\\|"), "run": name})
        rows = [list(lines[0]), ["---"] * len(lines[0]), *(line.values() for line in lines)]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        files = {
            "sweep.json": to_json(self.results, indent=1).encode(),
            "table.md": f"`{self.options.metric}`, mean of the last {self.options.window}\n\n{table}\n".encode(),
        }
        if points:
            files["plot.svg"] = draw_knob(points, knob=self.knob, metric=self.options.metric)
        with storage_errors(self.root):
            (self.root / "logs").mkdir(parents=True, exist_ok=True)
            for file, content in files.items():
                replace_file(self.root / file, content)


def run_all(sweep: Sweep) -> int:
    """Runs the unfinished runs, each in a process of its own, at most `jobs` at a time. Returns the exit code. If a run
    fails, records this and continues with the others. If a signal comes, starts no further runs and sends SIGTERM to
    the active ones: they write a checkpoint and end."""
    waiting = [name for name, result in sweep.results.items() if result["code"] != EXIT_OK]
    active: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    is_stopping = False
    sweep.write()
    say(f"{sweep.root}: {len(sweep.runs)} runs, {len(sweep.runs) - len(waiting)} done")
    with Stop(STOP_S) as stop:
        while active or waiting:
            if stop.requested() and not is_stopping:
                is_stopping = True
                waiting.clear()
                for process, _ in active.values():
                    process.terminate()
            while waiting and len(active) < sweep.options.jobs:
                name = waiting.pop(0)
                active[name] = (sweep.start(name), time.monotonic())
                say(f"{name}: started; its output: {sweep.log(name)}")
            now = time.monotonic()
            for name, (process, started) in list(active.items()):
                if process.poll() is not None:
                    del active[name]
                    if process.returncode == EXIT_OK:
                        error = ""
                    else:
                        error = sweep.last_line(name)
                    sweep.results[name] = {"code": process.returncode, "seconds": now - started, "error": error}
                    sweep.write()
                    say(f"{name}: {sweep.state(name)} after {now - started:.0f} s")
            time.sleep(POLL_S)
    if stop.exit_code is not None:
        return stop.exit_code
    if all(sweep.state(name) == "done" for name in sweep.runs):
        return EXIT_OK
    return EXIT_FAILED


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the arguments `words`. Returns the options of the sweep, and the arguments that all runs have. Raises
    BadInput."""
    parser = Parser(
        prog="trireme sweep",
        description="A run for each point of a grid. The same command again continues what is not finished.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("kind", choices=MODULES, help="the command of each run, whose keys may follow")
    add("--grid", type=read_grid, action="append", required=True, help="values of a key, with commas or as a JSON list")
    add("--metric", required=True, help="column of metrics.jsonl that is compared at the end of each run")
    add("--window", type=positive, default=1, metavar="N", help="... as the mean of its last values (1)")
    add("--jobs", type=positive, default=1, metavar="N", help="runs at the same time (1)")
    add("--name", help="of the sweep's directory in run.output_dir (made from the configuration)")
    add("--dry-run", action="store_true", help="print the runs, and the plan of the first, and record nothing")
    return parser.parse_known_args(list(words))


def positive(text: str) -> int:
    """Converts an argument to a whole number of at least 1. Raises ArgumentTypeError."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError("a whole number of at least 1")
    return int(text)


def read_grid(text: str) -> tuple[str, list[str]]:
    """Parses `KEY=VALUE,VALUE,...` or `KEY=[...]`, a list in JSON. Returns the key and its values as texts. Raises
    ArgumentTypeError."""
    key, _, listed = text.partition("=")
    values = value_of(listed)
    if isinstance(values, list):
        texts = [value if isinstance(value, str) else to_json(value) for value in values]
    else:
        texts = [part.strip() for part in listed.split(",")]
    if not key or not texts or not all(texts) or len(set(texts)) < len(texts):
        raise argparse.ArgumentTypeError(f"{text}: expected KEY=VALUE,VALUE,... with each value once")
    return key.removeprefix("--").replace("-", "_"), texts


def value_of(text: str) -> object:
    """Parses `text` as JSON, so that the plot gets numbers. Returns `text` itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def name_of(point: Mapping[str, str]) -> str:
    """Returns the name of the directory of the run at `point`, {key: value}: a readable text, with a hash if the text
    had to be cut or changed."""
    text = ",".join(f"{key}={value}" for key, value in point.items())
    plain = re.sub(r"[^\w.,=+-]", "_", text)[:MAX_NAME]
    if plain == text:
        return plain
    return f"{plain}-{short_digest(text)}"


def short_digest(text: str) -> str:
    """Returns a hash of `text` as 8 hex digits."""
    return blake2b(text.encode(), digest_size=4).hexdigest()


def main(words: Sequence[str]) -> int:
    """Runs `trireme sweep` with the arguments `words`, and returns its exit code. Raises BadInput, StorageFailed."""
    sweep = Sweep(*parse(words))
    if sweep.options.dry_run:
        say(f"{sweep.root}: {len(sweep.runs)} runs")
        for name in sweep.runs:
            say(f"  {name}: {sweep.state(name)}")
        say("the plan of the first:")
        command = next(iter(sweep.commands.values()))
        return subprocess.run(
            [sys.executable, "-m", ENTRY, MODULES[sweep.options.kind], *command, "--dry-run"]
        ).returncode
    code = run_all(sweep)
    say((sweep.root / "table.md").read_text(), *sorted(sweep.root.glob("*.*")), sep="\n")
    return code
