"""Starts the rooms of a run in their places, and takes all down again. The only module that knows all rooms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ray.util.placement_group import placement_group_table

from inference.engine import engine_args
from inference.group import InferenceGroup
from orchestrator.handle import OrchestratorHandle
from trainer.group import TrainerGroup
from trainer.schedule import learning_rate_schedule
from trireme import trace, waits
from trireme.cluster import Progress, reserve
from trireme.config import Config
from trireme.config.model_facts import ModelFacts
from trireme.metrics import ConsoleSink, Journal, JsonlSink, Reader, Sink, WandbSink
from trireme.plan import Plan
from trireme.rollouts import RolloutFiles
from trireme.rundir import RunDir, Start


@dataclass(frozen=True)
class Rooms:
    """The three rooms, ready. `nodes`: how many nodes of the cluster they are on."""

    nodes: int
    trainer: TrainerGroup
    inference: InferenceGroup
    orchestrator: OrchestratorHandle


def _start_rooms(config: Config, plan: Plan, run: RunDir, progress: Progress, ending: ExitStack) -> Rooms:
    """All rooms side by side: each `start` returns at once, then one wait covers all. `ending` gets their stops."""
    deadline, log_dir = time.monotonic() + config.timeouts.start_s, run.logs
    resources = [*plan.trainer_options_R, *plan.inference_options_N, plan.orchestrator_options]
    group, options = reserve(resources, config.timeouts.start_s, progress, ending)
    shards, replicas = len(plan.trainer_options_R), len(plan.inference_options_N)
    inference = InferenceGroup.start(config, options[shards : shards + replicas], log_dir)  # the slowest first
    ending.callback(inference.stop)
    trainer = TrainerGroup.start(config, options[:shards], log_dir, run.start.attempt)
    ending.callback(trainer.stop)
    planned = _with_device(config, plan)
    orchestrator = OrchestratorHandle.start(
        planned, inference.router_factory(), options[-1], log_dir, inference.reserved_factory()
    )
    ending.callback(orchestrator.stop)
    refs, names = [], []
    for room in (inference, trainer, orchestrator):
        room_refs, room_names = room.ready_refs()
        refs += room_refs
        names += room_names
    waits.get_all(refs, who=names, timeout_s=max(deadline - time.monotonic(), 1.0), log=log_dir, on_tick=progress)
    nodes = len(set(placement_group_table(group)["bundles_to_node_id"].values()))
    return Rooms(nodes, trainer, inference, orchestrator)


def evaluation_rooms(
    config: Config, plan: Plan, log_dir: Path, progress: Progress, ending: ExitStack
) -> OrchestratorHandle:
    """The orchestrator, with replicas that hold what they loaded. `ending` gets the stops of all."""
    _, options = reserve(
        [*plan.inference_options_N, plan.orchestrator_options], config.timeouts.start_s, progress, ending
    )
    inference = InferenceGroup.start(config, options[:-1], log_dir)
    ending.callback(inference.stop)
    orchestrator = OrchestratorHandle.start(
        _with_device(config, plan), inference.router_factory(), options[-1], log_dir
    )
    ending.callback(orchestrator.stop)
    ready = [room.ready_refs() for room in (inference, orchestrator)]
    refs, names = ([item for room in ready for item in room[part]] for part in (0, 1))
    waits.get_all(refs, who=names, timeout_s=config.timeouts.start_s, log=log_dir, on_tick=progress)
    return orchestrator


def _with_device(config: Config, plan: Plan) -> Config:
    """The configuration with the device that models compute on in place of auto."""
    return config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"device": "gpu" if plan.on_gpus else "cpu"})}
    )


def learning_rate(config: Config, facts: ModelFacts) -> Callable[[int], float]:
    """The learning rate of each step."""
    return learning_rate_schedule(config, facts.model_type, facts.hidden_size)


def check_rooms(config: Config, plan: Plan) -> None:
    """What only the rooms know to be wrong. Raises BadInput."""
    engine_args(config, on_cpu=not plan.on_gpus)


@contextmanager
def journal(config: Config, run: RunDir, out: TextIO) -> Iterator[Journal]:
    """All that is written about each step."""
    with ExitStack() as ending:
        trace.start(run.logs, "driver_0", config.trace.max_mb)
        ending.callback(trace.stop)
        sinks: list[Sink] = [JsonlSink(run.metrics), ConsoleSink(config.max_steps, out)]
        readers: list[Reader] = [RolloutFiles(run.rollouts)]
        if config.wandb.project:
            wandb = WandbSink(config, run.run_id, run.root.name, run.root)
            sinks.append(wandb)
            readers.append(wandb)
        witness = JsonlSink(run.trained)
        for sink in (*sinks, witness):
            ending.callback(sink.close)
        yield Journal(sinks, witness, readers)


@contextmanager
def rooms(config: Config, plan: Plan, run: RunDir, progress: Progress) -> Iterator[Rooms]:
    """The rooms of an attempt, started and, however it ends, stopped."""
    with ExitStack() as ending:
        yield _start_rooms(config, plan, run, progress, ending)


def load(rooms: Rooms, start: Start) -> None:
    """Gives trainer and orchestrator what the commit holds that the run starts from, if it starts from one."""
    if start.commit and start.manifest:
        rooms.trainer.load_state(start.commit / "trainer", start.manifest.identities)
        rooms.orchestrator.load_state(start.commit / "orchestrator")
