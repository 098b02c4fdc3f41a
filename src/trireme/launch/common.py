"""Prepares a start, and tells its progress. Imports no Ray: `prepare_cluster` must be called before that."""

from __future__ import annotations

from rich.console import Console

from trireme.config import CommonConfig
from trireme.plan.base import Plan
from trireme.process import signals
from trireme.process.environ import cluster_address, prepare_ray_environment

PROGRESS_EVERY_S = 5.0


def prepare_cluster(config: CommonConfig, plan: Plan) -> None:
    """Prepares the environment for Ray. Raises BadInput when this machine lacks what the run needs."""
    if (address := cluster_address(config)) is None:
        plan.check_resources()
    prepare_ray_environment(address, plan.threads, config.deterministic)


class StartProgress:
    """Says every few seconds of a long start what is waited for. Raises Stopped after a signal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = PROGRESS_EVERY_S

    def __call__(self, names: list[str], waited_s: float) -> None:
        signals.check()
        if waited_s >= self._next_s:
            self._next_s = waited_s + PROGRESS_EVERY_S
            self._console.print(f"waiting for {', '.join(names)} ({waited_s:.0f} s)")
