"""Prepares a start, and tells its progress. Imports no Ray: `prepare_cluster` must be called before that."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from trireme.config import CommonConfig
from trireme.plan.base import Plan
from trireme.process import signals
from trireme.process.environ import cluster_address, prepare_ray_environment

PROGRESS_EVERY_S = 5.0
LONGEST_LINE = 100
"""Characters of the log of a process that are shown."""
ACTOR = re.compile(r"(?P<room>trainer|inference|orchestrator)( (shard|replica) (?P<number>\d+))?")
"""The name of an actor of a room."""


def prepare_cluster(config: CommonConfig, plan: Plan) -> None:
    """Prepares the environment for Ray. Raises BadInput when this machine lacks what the run needs."""
    if (address := cluster_address(config)) is None:
        plan.check_resources()
    prepare_ray_environment(address, plan.threads, config.deterministic)


class StartProgress:
    """Says every few seconds of a long start what is waited for. Raises Stopped after a signal."""

    def __init__(self, console: Console, logs: Path | None = None) -> None:
        """`logs`: the directory where the processes that are waited for have their logs."""
        self._console, self._logs = console, logs
        self._next_s = PROGRESS_EVERY_S

    def __call__(self, names: list[str], waited_s: float) -> None:
        signals.check()
        if waited_s >= self._next_s:
            self._next_s = waited_s + PROGRESS_EVERY_S
            said = ", ".join(f"{name}{self._doing(name)}" for name in names)
            self._console.print(f"waiting for {said} ({waited_s:.0f} s)", markup=False)

    def _doing(self, name: str) -> str:
        """Returns what a process has come to, by its log."""
        found = ACTOR.match(name)
        if self._logs is None or found is None:
            return ""
        log = self._logs / f"{found['room']}_{found['number'] or 0}.log"
        if not log.exists():
            return ": its process is starting"
        lines = log.read_text(errors="replace").split("\n")
        last = next(
            (line.strip() for line in reversed(lines) if line.strip()), "it imports packages and loads the model"
        )
        return f": {last[:LONGEST_LINE]}"
