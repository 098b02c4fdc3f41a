"""Starts and connects the rooms of `rl`: each attempt builds trainer and orchestrator again; replicas outlive attempts.

When an attempt ends, an orchestrator that is still alive first closes its environments.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from inference.engine import engine_args
from inference.handle import InferenceHandle
from inference.replica_set.handle import ReplicaSetHandle
from orchestrator.handle import OrchestratorHandle
from service.handle import ServiceHandle
from trainer.batching import RankAssignment
from trainer.handle import TrainerHandle
from trireme.checkpoint.rows import attempts_before
from trireme.config import Config
from trireme.config.model_facts import ModelFacts
from trireme.config.resume_compat import fixed_parts
from trireme.core.types import WeightIdentity
from trireme.launch.common import StartProgress
from trireme.launch.run import Core, TrainingRun
from trireme.launch.service import POLICY, SESSIONS, check_port, keys_of, served_models, sessions_factory
from trireme.launch.starting import await_ready, check_replicas, reserve_places
from trireme.plan.whole import Plan
from trireme.process.ray_cluster import PlacePool
from trireme.run.metrics import Journal, step_line
from trireme.run.rundir import RunDir
from trireme.supervision.roster import Roster
from trireme.supervision.status import ScaleRequests
from trireme.supervision.supervisor import ElasticReplicas
from trireme.train.guards import Guard
from trireme.train.kl_reference import keep_reference
from trireme.train.rl_loop import train
from trireme.train.steps import Attempt, Rooms

ON_UPDATE = "inference.on_update"


class RlRun(TrainingRun):
    """The part of a run that is particular to `rl`: its rooms, and its training loop."""

    core = "trainer and orchestrator"
    lasting = frozenset({"inference"})
    saving = ("trainer", "orchestrator")
    guard = Guard
    config: Config

    def __init__(self, config: Config, facts: ModelFacts, plan: Plan) -> None:
        """Runs the checks that need no actors. Raises BadInput for options that vLLM refuses, and if the port of the
        service is taken."""
        super().__init__(config, facts, plan, fixed_parts(config, facts))
        if config.service.port is not None:
            check_port(config)
        engine_args(config, on_cpu=not plan.on_gpus)
        self._incarnations = itertools.count(1)  # of replica sets
        self._say = Console(markup=False, highlight=False, soft_wrap=True).print

    @property
    def decided(self) -> Mapping[str, object]:
        return {ON_UPDATE: self.plan.resolved(self.config).inference.on_update}

    def enter(self, run: RunDir) -> None:
        """Prepares the run. Call it before Ray starts, which takes a while, so that errors come early. If a checkpoint
        holds the KL reference's weights, marks the checkpoint so that no run deletes it. If `inference.on_update` is
        auto in a run that is not colocated, takes its value from the checkpoint that the run starts from, if there is
        one. If the service has a port, reads or makes its keys. Raises BadInput."""
        keep_reference(self.config)
        inference = self.config.inference
        manifest = run.start.manifest
        takes_over = inference.on_update == "auto" and not self.config.colocated
        if takes_over and manifest and ON_UPDATE in manifest.decided:
            on_update = manifest.decided[ON_UPDATE]
            self._say(f"{ON_UPDATE} = auto: {on_update}, as the checkpoint was made with")
            inference = inference.model_copy(update={"on_update": on_update})
            self.config = self.config.model_copy(update={"inference": inference})
        if self.config.service.port is not None:
            self._keys = keys_of(self.config, run.root, self._say)

    def start_lasting(self, run: RunDir, roster: Roster, ending: ExitStack) -> ElasticReplicas:
        """Starts the replicas, which take longest, and the service if it has a port. Returns the replicas, in a form
        that can change their number. `ending` gets the calls that stop all of these actors."""
        config = self.plan.resolved(self.config)
        places = PlacePool(self.plan.added_replica_options, ending)
        self.inference = InferenceHandle.start(config, self.places["inference"], run.logs)
        ending.callback(self.inference.stop)
        self._service: ServiceHandle | None = None
        if config.service.port is not None:
            self._service = ServiceHandle.start(
                config,
                self.inference.chat_router_factory(),
                served_models(config, self.facts, (POLICY,)),
                self._keys,
                True,
                run.root / SESSIONS,
                run.logs,
                self._say,
                roster,
                attempts_before(run.root, run.start.step),
            )
            ending.callback(self._service.stop)
        check_number = partial(check_replicas, self.plan)
        return ElasticReplicas(config, self.inference, ScaleRequests(run.root), places, check_number)

    def start(self, run: RunDir, ending: ExitStack) -> Core:
        config = self.plan.resolved(self.config)
        replicas = ReplicaSetHandle(config, run.logs, self._incarnations)
        ending.callback(replicas.stop)
        trainer = TrainerHandle.start(
            config,
            self.places["trainer"],
            run.logs,
            run.start.attempt,
            replicas.offer,
            config.timeouts.update_s,
            self.plan.taken_share,
            self.plan.offloads,
        )
        ending.callback(trainer.stop)
        orchestrator = self._start_orchestrator(config, replicas, run)
        ending.callback(orchestrator.stop)
        replicas.followers.append(orchestrator.follow)
        if self._service:
            self._service.attempt_begins(run.start.attempt, run.start.step)
            self._service.follow(replicas.source)
            replicas.followers.append(self._service.follow)
        self._rooms = Rooms(trainer, orchestrator, replicas.update, replicas.sleep)
        rooms = trainer, replicas, orchestrator
        return Core(trainer, {"orchestrator": orchestrator}, rooms, replicas)

    def _start_orchestrator(self, config: Config, replicas: ReplicaSetHandle, run: RunDir) -> OrchestratorHandle:
        return OrchestratorHandle.start(
            config,
            self.inference.router_factory(replicas.source, run.start.attempt),
            self.places["orchestrator"][0],
            run.logs,
            RankAssignment(
                config.trainer.mesh.data_parallel, self.facts.attention_length, config.trainer.shares_prefixes
            ),
            sessions_factory(config, self.facts),
        )

    def train(self, core: Core, attempt: Attempt, journal: Journal) -> None:
        train(self.plan.resolved(self.config), self._rooms, attempt, journal)

    def step_line(self, row: Mapping[str, object]) -> str:
        return step_line(row, self.config.max_steps)


def evaluation_rooms(
    config: Config, plan: Plan, identity: WeightIdentity, log_dir: Path, console: Console, ending: ExitStack
) -> OrchestratorHandle:
    """Starts the orchestrator and replicas for an evaluation, and waits until they are ready. Returns the orchestrator.
    The replicas keep the weights that they load from disk, which get the name `identity`. `ending` gets the calls that
    stop all actors."""
    progress = StartProgress(console, log_dir)
    places = reserve_places(plan, progress, console, ending).rooms
    config = plan.resolved(config)
    inference = InferenceHandle.start(config, places["inference"], log_dir)
    ending.callback(inference.stop)
    replicas = ReplicaSetHandle(config, log_dir, adopt=identity)
    ending.callback(replicas.stop)
    factory = inference.router_factory(replicas.source, identity.attempt)
    sessions = sessions_factory(config, plan.facts)
    options = places["orchestrator"][0]
    orchestrator = OrchestratorHandle.start(config, factory, options, log_dir, sessions_factory=sessions)
    ending.callback(orchestrator.stop)
    starting = [inference.ready_refs(), replicas.ready_refs(), orchestrator.ready_refs()]
    await_ready(starting, plan, log_dir, progress)
    for index in inference.indices:
        replicas.actor.join.remote(index, inference.client(index))
    return orchestrator
