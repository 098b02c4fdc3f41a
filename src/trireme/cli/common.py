"""The common part of all commands: how they refuse, how they end, and what they print before and after a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from trireme.config import CommonConfig, Config
from trireme.config.checks import check
from trireme.config.installed import check_installed
from trireme.config.load import Loaded
from trireme.config.model_facts import ModelFacts
from trireme.core.errors import EXIT_OK, TriremeError
from trireme.core.refusals import Refusal
from trireme.plan.whole import PartKind, Plan
from trireme.process import signals
from trireme.process.environ import Resources, keep_compiled_code
from trireme.process.faults import fault_point
from trireme.run.rundir import resume_command


def run_command(command: Callable[[list[str], Console], None], argv: Sequence[str]) -> int:
    """Calls `command` with the arguments `argv` and a console. Prints errors, and returns the exit code
    (`trireme.core.errors`)."""
    signals.arm()
    keep_compiled_code()
    console = Console(markup=False, highlight=False, soft_wrap=True)
    try:
        with signals.as_stopped():
            fault_point("driver.command")
            command(list(argv), console)
    except (TriremeError, signals.Stopped) as error:
        if isinstance(error, TriremeError):
            message = f"error: {error}"
        else:
            message = f"{error}; nothing is left running"
        print("\n".join([message, *getattr(error, "__notes__", [])]), file=sys.stderr)
        return error.exit_code
    return EXIT_OK


class Parser(argparse.ArgumentParser):
    """A command-line parser that raises BadInput for a wrong command line. The user thus sees this error in the same
    form as all others."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage:").split())
        raise Refusal(message, usage, f"{self.prog} --help")


def show(plan: Plan, config: CommonConfig, console: Console) -> None:
    """Prints the plan as a table and the configuration as JSON, for a dry run."""
    console.print(plan.render(whole=True))
    console.print(config.model_dump_json(indent=2))


def planned(loaded: Loaded[Config], rooms: Sequence[PartKind], console: Console) -> Plan | None:
    """Returns the plan of a command that starts `rooms` but has no run directory. Checks the configuration, and prints
    the warnings. For a dry run, prints the plan and the configuration instead, and returns None. Raises BadInput."""
    config = loaded.config
    facts = ModelFacts.of(config, required=True)
    plan = Plan(config, facts, Resources.of_this_machine(), rooms, notes=check(config, facts))
    if loaded.dry_run:
        show(plan, config, console)
        return None
    check_installed()
    for warning in plan.notes:
        console.print(f"warning: {warning}", style="yellow")
    return plan


def next_steps(root: Path, max_steps: int, seconds: float, plot: str, model: str, about_model: str) -> str:
    """Returns a text for the user of a finished run: suggested commands, one on each line with a comment. `root`: the
    run directory; `seconds`: how long the run took; `plot`: the command that draws the run's curve; `model`: a
    command that uses the trained model, with the comment `about_model`."""
    commands = {
        plot: "the curve, as an SVG file",
        f"uv run --no-sync trireme watch {root} --web": "all curves, rollouts and logs in a browser",
        f"uv run --no-sync trireme inspect {root}": "what the run holds, and its checkpoints",
        model: about_model,
        resume_command(root, longer=2 * max_steps, trusted=True): "the same run, for longer",
    }
    lines = [f"  {command}  # {comment}" for command, comment in commands.items()]
    return "\n".join([f"\nstep {max_steps} reached after {seconds:.0f} s. What next:", *lines])


def from_here(root: Path) -> Path:
    """Returns `root` relative to the working directory if `root` lies below it, so that commands with the path are
    short; else `root` itself."""
    if root.is_relative_to(Path.cwd()):
        return root.relative_to(Path.cwd())
    return root
