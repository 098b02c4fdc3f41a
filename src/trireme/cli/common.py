"""What the commands that train have in common: how they end, what they say while they wait, how one goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from trireme.config import CommonConfig
from trireme.core.errors import EXIT_OK, BadInput, TriremeError
from trireme.plan.base import Plan
from trireme.process import signals
from trireme.process.environ import cluster_address, prepare_existing_cluster, prepare_local_cluster
from trireme.run.rundir import RunDir, resume_command
from trireme.supervision.roster import Incident, Roster
from trireme.supervision.status import StatusWriter

PROGRESS_EVERY_S = 5.0


def run_command(command: Callable[[list[str], Console], None], argv: Sequence[str]) -> int:
    """Runs `command` with its arguments and returns its exit code (`trireme.core.errors`)."""
    signals.arm()
    console = Console(highlight=False, soft_wrap=True)
    try:
        command(list(argv), console)
    except TriremeError as error:
        print("\n".join([f"error: {error}", *notes_of(error)]), file=sys.stderr)
        return error.exit_code
    except signals.Stopped as stopped:
        print("\n".join([f"{stopped}; all rooms are down", *notes_of(stopped)]), file=sys.stderr)
        return stopped.exit_code
    return EXIT_OK


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def prepare_cluster(config: CommonConfig, plan: Plan) -> None:
    """The environment for Ray, before it is imported. Raises BadInput when this machine has not what the run needs."""
    if cluster_address(config) is None:
        plan.check_resources()
        prepare_local_cluster(plan.threads, config.deterministic)
    else:
        prepare_existing_cluster()


class StartProgress:
    """Says every few seconds of a long start what is waited for."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = PROGRESS_EVERY_S

    def __call__(self, names: list[str], waited_s: float) -> None:
        if waited_s >= self._next_s:
            self._next_s = waited_s + PROGRESS_EVERY_S
            self._console.print(f"waiting for {', '.join(names)} ({waited_s:.0f} s)")


@contextmanager
def told_roster(run: RunDir, say: Callable[[str], None]) -> Iterator[Roster]:
    """How the parts of a run are, and what becomes of them: said, and written to the run directory."""

    def tell(_roster: Roster, incident: Incident | None) -> None:
        if incident:
            say(f"! {incident.part}: {incident.what}")

    roster = Roster(time.time)
    roster.attempt, roster.step = run.start.attempt, run.start.step
    roster.listen(tell)
    with StatusWriter(run.root, roster):
        yield roster


@contextmanager
def telling_how_to_go_on(run: RunDir) -> Iterator[None]:
    """Adds to what ends a run early: which commit is the newest, and the command that goes on from it."""
    try:
        yield
    except (TriremeError, signals.Stopped) as error:
        if not isinstance(error, BadInput):
            error.add_note(how_to_go_on(run))
        raise


def how_to_go_on(run: RunDir) -> str:
    commits = run.store.commits()
    begun = f"The newest commit is {commits[-1].name}" if commits else "There is no commit yet"
    return f"{begun}; the run goes on with:\n  {resume_command(run.root)}"
