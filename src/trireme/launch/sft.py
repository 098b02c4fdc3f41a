"""The trainer of a supervised run in its places, and all that is written about each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from trainer.handle import TrainerHandle
from trainer.schedule import learning_rate_schedule
from trireme.config.model_facts import ModelFacts
from trireme.config.sft import SftConfig
from trireme.plan.base import Plan
from trireme.process import trace, waits
from trireme.process.ray_cluster import Progress, reserve
from trireme.run.metrics import JsonlSink, Sink, WandbSink
from trireme.run.rundir import RunDir
from trireme.sft.data import SftData
from trireme.supervision.roster import Roster
from trireme.supervision.supervisor import Supervisor
from trireme.train.sft_loop import Rows


@dataclass(frozen=True)
class RosterSink:
    """Tells the roster of every step."""

    roster: Roster

    def write(self, row: Mapping[str, Any]) -> None:
        self.roster.at_step(row["step"] + 1)

    def close(self) -> None: ...


@contextmanager
def attempt(
    config: SftConfig,
    plan: Plan,
    run: RunDir,
    data: SftData,
    supervisor: Supervisor,
    progress: Progress,
    say: Callable[[str], None],
) -> Iterator[TrainerHandle]:
    """All shards, ready, which have loaded what the attempt starts from, as `data` has; stopped however it ends."""
    started, log_dir, limit = time.monotonic(), run.logs, config.timeouts.start_s
    supervisor.roster.attempt = run.start.attempt
    supervisor.roster.at_step(run.start.step)
    with ExitStack() as ending:
        _, options = reserve(plan.options, limit, progress, ending, plan.blocks)
        trainer = TrainerHandle.start(plan.with_device(config), options, log_dir, run.start.attempt)
        ending.callback(trainer.stop)
        ending.push(lambda _kind, error, _traceback: supervisor.detach(error))
        supervisor.expect(trainer)
        refs, names = trainer.ready_refs()
        left_s = max(limit - (time.monotonic() - started), 1.0)
        waits.get_all(refs, who=names, timeout_s=left_s, log=log_dir, on_tick=progress)
        supervisor.attach(trainer)
        data.load_state(run.start.commit and run.start.commit / "data")
        if run.start.commit and run.start.manifest:
            trainer.load_state(run.start.commit / "trainer", run.start.manifest.identities)
        run.checkout()
        say(f"the trainer is ready after {time.monotonic() - started:.1f} s")
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
