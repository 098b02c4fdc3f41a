"""The trainer of a supervised run in its places, and all that is written about each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

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


@contextmanager
def started_trainer(config: SftConfig, plan: SftPlan, run: RunDir, progress: Progress) -> Iterator[TrainerGroup]:
    """All shards, ready; stopped however the run ends."""
    deadline, log_dir = time.monotonic() + config.timeouts.start_s, run.logs
    with ExitStack() as ending:
        limit = config.timeouts.start_s
        _, options = reserve(plan.trainer_options_R, limit, progress, ending, plan.trainer_blocks)
        trainer = TrainerGroup.start(config, options, log_dir, run.start.attempt)
        ending.callback(trainer.stop)
        refs, names = trainer.ready_refs()
        waits.get_all(refs, who=names, timeout_s=max(deadline - time.monotonic(), 1.0), log=log_dir, on_tick=progress)
        yield trainer


def learning_rate(config: SftConfig, facts: ModelFacts) -> Callable[[int], float]:
    """The learning rate of each step."""
    return learning_rate_schedule(config, facts.model_type, facts.hidden_size)


@contextmanager
def written_rows(config: SftConfig, run: RunDir, console: Sink) -> Iterator[Rows]:
    """All that is written about each step."""
    with ExitStack() as ending:
        trace.start(run.logs, "driver_0", config.trace.max_mb)
        ending.callback(trace.stop)
        sinks: list[Sink] = [JsonlSink(run.metrics), console]
        if config.wandb.project:
            sinks.append(WandbSink(config, run.run_id, run.root.name, run.root))
        witness = JsonlSink(run.trained)
        for sink in (*sinks, witness):
            ending.callback(sink.close)
        yield Rows(sinks, witness)
