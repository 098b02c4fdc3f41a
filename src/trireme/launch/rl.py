"""Starts the rooms of a run in their places, and takes all down again. The only module that knows all rooms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ray.util.placement_group import placement_group_table

from inference.engine import engine_args
from inference.handle import InferenceHandle
from orchestrator.handle import OrchestratorHandle
from trainer.handle import TrainerHandle
from trainer.schedule import learning_rate_schedule
from trireme.cli.common import told_roster
from trireme.config import Config
from trireme.config.model_facts import ModelFacts
from trireme.plan.base import Plan
from trireme.process import trace, waits
from trireme.process.ray_cluster import PlacePool, Progress, reserve
from trireme.run.metrics import ConsoleSink, Journal, JsonlSink, Reader, Sink, WandbSink
from trireme.run.rollout_records import RolloutFiles
from trireme.run.rundir import RunDir
from trireme.supervision.status import ScaleRequests
from trireme.supervision.supervisor import Elastic, Supervisor


@dataclass(frozen=True)
class Rooms:
    """The three rooms of an attempt, ready."""

    trainer: TrainerHandle
    inference: InferenceHandle
    orchestrator: OrchestratorHandle


@dataclass(frozen=True)
class Places:
    """Where the actors of a run are, or will be again: Ray's options of each, and the replicas, which outlive
    attempts."""

    config: Config
    nodes: int
    trainer_R: list[dict[str, Any]]
    orchestrator: dict[str, Any]
    inference: InferenceHandle
    for_more: PlacePool


@contextmanager
def places(config: Config, plan: Plan, run: RunDir, progress: Progress) -> Iterator[Places]:
    """Places for all actors. The replicas, which take longest to start, begin to; all are stopped at the end."""
    config = plan.with_device(config)
    with ExitStack() as ending:
        group, options = reserve(plan.options, config.timeouts.start_s, progress, ending, plan.blocks)
        of_room = plan.by_room(options)
        for_more = PlacePool(plan.added_replica_options, ending)
        inference = InferenceHandle.start(config, of_room["inference"], run.logs)
        ending.callback(inference.stop)
        nodes = len(set(placement_group_table(group)["bundles_to_node_id"].values()))
        yield Places(config, nodes, of_room["trainer"], of_room["orchestrator"][0], inference, for_more)


@contextmanager
def supervised(
    config: Config, plan: Plan, run: RunDir, progress: Progress, say: Callable[[str], None]
) -> Iterator[tuple[Places, Supervisor]]:
    """Places for all actors, and who watches them. What happens to them is said, and written to the run directory."""
    with told_roster(run, say) as roster, places(config, plan, run, progress) as found:
        elastic = Elastic(config, found.inference, ScaleRequests(run.root), found.for_more)
        with Supervisor(config, roster, "trainer and orchestrator", elastic) as supervisor:
            yield found, supervisor


@contextmanager
def attempt(
    places: Places, run: RunDir, supervisor: Supervisor, progress: Progress, say: Callable[[str], None]
) -> Iterator[Rooms]:
    """Trainer and orchestrator, started side by side, which have loaded what the attempt starts from, and replicas that
    serve: all of them in the first attempt of the command and in deterministic mode, else one at least. However it
    ends, trainer and orchestrator are stopped."""
    config, inference, started_at = places.config, places.inference, time.monotonic()
    supervisor.roster.attempt = run.start.attempt
    supervisor.roster.at_step(run.start.step)
    with ExitStack() as ending:
        trainer = TrainerHandle.start(config, places.trainer_R, run.logs, run.start.attempt)
        ending.callback(trainer.stop)
        orchestrator = OrchestratorHandle.start(
            config,
            inference.router_factory(()),  # replicas join as they are ready
            places.orchestrator,
            run.logs,
            inference.router_factory(()) if config.eval.replicas else None,
        )
        ending.callback(orchestrator.stop)
        ending.push(lambda _kind, error, _traceback: supervisor.detach(error))
        supervisor.expect(trainer, orchestrator)
        started = [room.ready_refs() for room in (trainer, orchestrator)]
        refs, names = ([item for room in started for item in room[part]] for part in (0, 1))
        limit = config.timeouts.start_s
        waits.get_all(refs, who=names, timeout_s=limit, log=run.logs, on_tick=checking(supervisor, progress))
        supervisor.attach(trainer, orchestrator, serving=orchestrator)
        supervisor.await_replicas(run.logs, progress)
        if run.start.commit and run.start.manifest:
            trainer.load_state(run.start.commit / "trainer", run.start.manifest.identities)
            orchestrator.load_state(run.start.commit / "orchestrator")
        run.checkout()
        where = "1 node" if places.nodes == 1 else f"{places.nodes} nodes"
        say(f"rooms on {where} ready after {time.monotonic() - started_at:.1f} s")
        yield Rooms(trainer, inference, orchestrator)


def checking(supervisor: Supervisor, progress: Progress) -> Progress:
    """Says what is waited for, and raises when there is no more use in it."""

    def tick(names: list[str], waited_s: float) -> None:
        supervisor.check()
        progress(names, waited_s)

    return tick


def evaluation_rooms(
    config: Config, plan: Plan, log_dir: Path, progress: Progress, ending: ExitStack
) -> OrchestratorHandle:
    """The orchestrator, with replicas that hold what they loaded. `ending` gets the stops of all."""
    config = plan.with_device(config)
    _, options = reserve(plan.options, config.timeouts.start_s, progress, ending)
    inference = InferenceHandle.start(config, options[:-1], log_dir)
    ending.callback(inference.stop)
    orchestrator = OrchestratorHandle.start(config, inference.router_factory(), options[-1], log_dir)
    ending.callback(orchestrator.stop)
    ready = [room.ready_refs() for room in (inference, orchestrator)]
    refs, names = ([item for room in ready for item in room[part]] for part in (0, 1))
    waits.get_all(refs, who=names, timeout_s=config.timeouts.start_s, log=log_dir, on_tick=progress)
    return orchestrator


def learning_rate(config: Config, facts: ModelFacts) -> Callable[[int], float]:
    """The learning rate of each step."""
    return learning_rate_schedule(config, facts.model_type, facts.hidden_size)


def check_rooms(config: Config, plan: Plan) -> None:
    """What only the rooms know to be wrong. Raises BadInput."""
    engine_args(config, on_cpu=not plan.on_gpus)


@contextmanager
def journal(config: Config, run: RunDir, wandb: WandbSink | None, out: TextIO) -> Iterator[Journal]:
    """All that is written about each step."""
    with ExitStack() as ending:
        trace.start(run.logs, "driver_0", config.trace.max_mb)
        ending.callback(trace.stop)
        witness = JsonlSink(run.trained)
        own: list[Sink] = [JsonlSink(run.metrics), ConsoleSink(config.max_steps, out)]
        for sink in (*own, witness):
            ending.callback(sink.close)
        sinks = [*own, *([wandb] if wandb else [])]
        readers: list[Reader] = [RolloutFiles(run.rollouts), *([wandb] if wandb else [])]
        yield Journal(sinks, witness, readers)
