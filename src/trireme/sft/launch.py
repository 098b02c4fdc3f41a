"""The trainer of a supervised run in its places, and all that is written about each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from trainer.group import TrainerGroup
from trainer.schedule import learning_rate_schedule
from trireme import trace, waits
from trireme.cluster import Progress, reserve
from trireme.config.model_facts import ModelFacts
from trireme.config.sft import SftConfig
from trireme.metrics import JsonlSink, Sink, WandbSink
from trireme.rundir import RunDir
from trireme.sft.loop import Rows
from trireme.sft.plan import SftPlan
from trireme.supervision.roster import Health, Roster


@dataclass(frozen=True)
class RosterSink:
    """Tells the roster of every step."""

    roster: Roster

    def write(self, row: Mapping[str, Any]) -> None:
        self.roster.at_step(row["step"] + 1)

    def close(self) -> None: ...


@contextmanager
def started_trainer(
    config: SftConfig, plan: SftPlan, run: RunDir, roster: Roster, progress: Progress
) -> Iterator[TrainerGroup]:
    """All shards, ready; stopped however the run ends."""
    deadline, log_dir = time.monotonic() + config.timeouts.start_s, run.logs
    roster.attempt = run.start.attempt
    roster.at_step(run.start.step)
    with ExitStack() as ending:
        limit = config.timeouts.start_s
        _, options = reserve(plan.trainer_options_R, limit, progress, ending, plan.trainer_blocks)
        trainer = TrainerGroup.start(config, options, log_dir, run.start.attempt)
        ending.callback(trainer.stop)
        pulses = trainer.pulses()
        for name in pulses:
            roster.set(name, Health.STARTING, pids=(), successor=roster.part(name) is not None)
        refs, names = trainer.ready_refs()
        waits.get_all(refs, who=names, timeout_s=max(deadline - time.monotonic(), 1.0), log=log_dir, on_tick=progress)
        found = waits.get_all([ask() for ask in pulses.values()], who=names, timeout_s=config.timeouts.start_s)
        for name, pulse in zip(pulses, found, strict=True):
            roster.set(name, Health.HEALTHY, pids=pulse.pids, node=pulse.node)
        yield trainer


def learning_rate(config: SftConfig, facts: ModelFacts) -> Callable[[int], float]:
    """The learning rate of each step."""
    return learning_rate_schedule(config, facts.model_type, facts.hidden_size)


@contextmanager
def written_rows(
    config: SftConfig, run: RunDir, roster: Roster, wandb: WandbSink | None, console: Sink
) -> Iterator[Rows]:
    """All that is written about each step."""
    with ExitStack() as ending:
        trace.start(run.logs, "driver_0", config.trace.max_mb)
        ending.callback(trace.stop)
        own: list[Sink] = [JsonlSink(run.metrics), console, RosterSink(roster)]
        witness = JsonlSink(run.trained)
        for sink in (*own, witness):
            ending.callback(sink.close)
        yield Rows([*own, *([wandb] if wandb else [])], witness)
