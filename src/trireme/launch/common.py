"""Prepares a start, and reports its progress. Imports no Ray: `prepare_cluster` must run before Ray is imported."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from trireme.config import CommonConfig
from trireme.core.refusals import Refusal
from trireme.plan.whole import Plan
from trireme.process import signals
from trireme.process.environ import cluster_address, prepare_ray_environment
from trireme.supervision.roster import PartHealth, Roster

UNPACKED = "/runtime_resources/working_dir_files/"
"""Part of the path at which Ray unpacks the files of a submitted job (`ray job submit --working-dir .`)."""
PROGRESS_EVERY_S = 5.0
LONGEST_LINE = 100
"""Number of characters of a log's last line that are shown."""
ACTOR = re.compile(r"(?P<room>trainer|inference|orchestrator)( (shard|replica) (?P<number>\d+))?")
"""The name of an actor of a room."""
BEGINNING = re.compile(r"\S+ \S+ [A-Z]+ [\w.]+: ")
"""Time, level and module, which begin a line of a log (`trireme.process.environ.redirect_output`)."""


def prepare_cluster(config: CommonConfig, plan: Plan) -> None:
    """Sets the environment variables that Ray reads at its import, for a run of `config`. Raises BadInput if a run on
    this machine alone needs more than the machine has, or if the run directory would lie where Ray deletes it."""
    address = cluster_address(config)
    if address is None:
        plan.check_resources()
    elif UNPACKED in str(output := Path(config.run.directory).expanduser().absolute()):
        key = "local_dir" if config.run.url else "output_dir"
        raise Refusal(
            f"run.{key} = {config.run.directory}, which is {output}. Ray unpacked this job there, on one node, and "
            "will delete all files there after the job",
            "a directory on a disk of the nodes"
            if config.run.url
            else "a directory that all nodes share and that outlives the job",
            f"give an absolute --run.{key.replace('_', '-')}",
        )
    prepare_ray_environment(address, plan.threads, config.deterministic)


class StartProgress:
    """Reports a long start. Every few seconds prints which actors are not ready yet, with the last line of each actor's
    log. Pass it as `on_tick` to a wait, which calls it about once a second. After a signal, raises Stopped."""

    def __init__(self, console: Console, logs: Path | None = None, roster: Roster | None = None) -> None:
        """`logs`: the directory with the logs of the awaited processes. `roster`: also gets the last log line of each
        starting process, about once a second."""
        self._console = console
        self._logs = logs
        self._roster = roster
        self._next_s = PROGRESS_EVERY_S

    def __call__(self, names: list[str], waited_s: float) -> None:
        signals.check()
        for name in names if self._roster else ():
            self._tell(name)
        if waited_s >= self._next_s:
            self._next_s = waited_s + PROGRESS_EVERY_S
            text = ", ".join(": ".join(filter(None, (name, self._stage(name)))) for name in names)
            self._console.print(f"waiting for {text} ({waited_s:.0f} s)")

    def _tell(self, name: str) -> None:
        assert self._roster is not None
        part = self._roster.part(_part_of(name))
        if part and part.health is PartHealth.STARTING:
            self._roster.set(part.name, part.health, self._stage(name))

    def _stage(self, name: str) -> str:
        """Returns the last line of the log of the actor `name`, which shows how far its start is; "" if the log is not
        known."""
        if self._logs is None or not _part_of(name):
            return ""
        log = self._logs / f"{_part_of(name)}.log"
        if not log.exists():
            return "its process is starting"
        lines = log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "importing packages")
        return BEGINNING.sub("", last)[:LONGEST_LINE]


def _part_of(name: str) -> str:
    """Returns the name that the roster and log files use for the actor `name`: "inference_1" for "inference replica 1".
    Returns "" for a name of another form."""
    match = ACTOR.match(name)
    if match:
        return f"{match['room']}_{match['number'] or 0}"
    return ""
