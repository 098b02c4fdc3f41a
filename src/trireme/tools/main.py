"""The command `trireme`: `trireme inspect RUN`, `trireme export RUN`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from trireme.config.problems import Problem
from trireme.errors import EXIT_OK, TriremeError
from trireme.tools.export import DTYPES, export
from trireme.tools.inspection import inspect, render, to_json

MARKS = ("config.json", "HEAD", "checkpoints")
"""A run directory holds one of these."""

PIPE_WIDTH = 200
"""Columns where there is no terminal: nothing is cut that a program, or a file, could hold."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command (of `sys.argv` when none is given) and returns its exit code (`trireme.errors`)."""
    try:
        options = _parser().parse_args(argv)
        options.command(options)
    except TriremeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return EXIT_OK


class _Parser(argparse.ArgumentParser):
    """Refuses as every command of this project does."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage:").split())
        raise Problem(message, usage, f"{self.prog} --help").error()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="trireme", description="Looks at runs, and takes models out of them.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    looking = commands.add_parser("inspect", help="commits and lineages of a run, what they hold, whether they verify")
    looking.add_argument("--json", action="store_true", help="for programs")
    looking.set_defaults(command=_inspect)

    taking = commands.add_parser("export", help="the model of a commit, in Hugging Face layout")
    taking.add_argument("--step", type=int, help="of which commit (default: the newest that verifies)")
    taking.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they were saved)")
    taking.add_argument("--out", type=Path, help="a new or empty directory (default: RUN/exports/<step>-<dtype>)")
    taking.set_defaults(command=_export)

    for command in (looking, taking):
        command.add_argument("run", metavar="RUN", type=Path, help="directory of the run")
    return parser


def _inspect(options: argparse.Namespace) -> None:
    root = _run_directory(options.run)
    with Console(stderr=True).status("reading commits") as status:
        report = inspect(root, lambda commit: status.update(f"reading {commit}"))
    if options.json:
        print(json.dumps(to_json(report), indent=1))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    for part in render(report):
        console.print(part, soft_wrap=isinstance(part, str), markup=False)


def _export(options: argparse.Namespace) -> None:
    root = _run_directory(options.run)
    with Console(stderr=True).status("choosing a commit") as status:
        written = export(root, options.step, options.dtype, options.out, lambda file: status.update(f"reading {file}"))
    print(f"{written.commit} is now {written.out}: {written.files} files, weights in {written.dtype}")


def _run_directory(given: Path) -> Path:
    root = given.expanduser().absolute()
    if not any((root / mark).exists() for mark in MARKS):
        raise Problem(
            f"{given}, which holds none of {', '.join(MARKS)}" if root.is_dir() else f"{given}, which is no directory",
            "the directory of a run, as `rl` makes it: run.output_dir/run.name",
            f"ls {given.parent}",
        ).error()
    return root


if __name__ == "__main__":
    sys.exit(main())
