"""Starts Ray (or joins a cluster), places the rooms, and takes all down again. The only module that knows all rooms."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import psutil
import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from inference.engine import engine_args
from inference.group import InferenceGroup
from orchestrator.handle import OrchestratorHandle
from trainer.group import TrainerGroup
from trainer.schedule import learning_rate_schedule
from trireme import trace, waits
from trireme.config import Config
from trireme.config.model_facts import ModelFacts
from trireme.environ import cluster_address
from trireme.errors import BadInput
from trireme.metrics import ConsoleSink, Journal, JsonlSink, Sink, WandbSink
from trireme.plan import Plan, Resources
from trireme.rundir import RunDir, Start

Progress = Callable[[list[str], float], None]
SHUTDOWN_S = 15.0
REACH_S = 5.0
LONGEST_TEMP_DIR = 28
"""Ray puts unix sockets some 60 characters below its directory, and the system allows 107 for the path of one."""


@dataclass(frozen=True)
class Rooms:
    """The three rooms, ready. `nodes`: how many nodes of the cluster they are on."""

    nodes: int
    trainer: TrainerGroup
    inference: InferenceGroup
    orchestrator: OrchestratorHandle


@contextmanager
def ray_cluster(config: Config, plan: Plan) -> Iterator[Resources]:
    """Ray for the time of a run: the cluster at `cluster_address`, or one started here that leaves nothing behind."""
    address = cluster_address(config)
    if address is None:
        with _local_cluster(plan):
            yield plan.resources
        return
    _refuse_unless_reachable(address)
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:
        yield cluster_resources()
    finally:
        ray.shutdown()


def _refuse_unless_reachable(address: str) -> None:
    """Raises BadInput when `address` is host:port and nothing listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdigit():  # "auto", "ray://...": Ray's own to resolve
        return
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise BadInput(
            f"cluster.address = {address}: no Ray cluster answers there ({error}). "
            "Start one with `ray start --head`, or leave the key out to start one on this machine."
        ) from None


@contextmanager
def _local_cluster(plan: Plan) -> Iterator[None]:
    base = tempfile.gettempdir()
    directory = tempfile.mkdtemp(prefix="trireme-", dir=base if len(base) <= LONGEST_TEMP_DIR else "/tmp")
    before = _children()
    os.environ["TMPDIR"] = directory  # for what actors and engines leave when they are killed (vLLM's sockets)
    try:
        ray.init(
            address="local",
            num_cpus=plan.resources.cpus,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=directory,
        )
        yield
    finally:
        started = [p for root in _children() - before for p in (root, *_children(root))]
        ray.shutdown()
        _end(started)
        shutil.rmtree(directory, ignore_errors=True)


def _children(of: psutil.Process | None = None) -> set[psutil.Process]:
    """Direct children of this process, or all descendants of another, which may have ended meanwhile."""
    try:
        return set(of.children(recursive=True) if of else psutil.Process().children())
    except psutil.NoSuchProcess:
        return set()


def _end(processes: list[psutil.Process]) -> None:
    """Waits until the cluster's processes are gone; those that stay are killed."""
    _, alive = psutil.wait_procs(processes, timeout=SHUTDOWN_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=SHUTDOWN_S)


def cluster_resources() -> Resources:
    """What the connected cluster has."""
    total = ray.cluster_resources()
    return Resources(
        nodes=sum(1 for node in ray.nodes() if node["Alive"]),
        cpus=int(total.get("CPU", 0)),
        gpus=int(total.get("GPU", 0)),
        memory_bytes=int(total.get("memory", 0)),
        source="the Ray cluster",
    )


def _reserve(bundles: list[dict[str, float]], timeout_s: float, progress: Progress) -> PlacementGroup:
    """Places of all actors at once, packed on as few nodes as possible."""
    group = placement_group(bundles, strategy="PACK")
    waits.get_all(
        [group.ready()],
        who=[f"Ray to place {len(bundles)} actors ({bundles})"],
        timeout_s=timeout_s,
        on_tick=progress,
    )
    return group


def _start_rooms(config: Config, plan: Plan, run: RunDir, progress: Progress, ending: ExitStack) -> Rooms:
    """All rooms side by side: each `start` returns at once, then one wait covers all. `ending` gets their stops."""
    deadline, log_dir = time.monotonic() + config.timeouts.start_s, run.logs
    resources = [*plan.trainer_options_R, *plan.inference_options_N, plan.orchestrator_options]
    group = _reserve([_bundle(r) for r in resources], config.timeouts.start_s, progress)
    ending.callback(remove_placement_group, group)
    options: list[dict[str, Any]] = [
        {**r, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)}
        for i, r in enumerate(resources)
    ]
    shards, replicas = len(plan.trainer_options_R), len(plan.inference_options_N)
    inference = InferenceGroup.start(config, options[shards : shards + replicas], log_dir)  # the slowest first
    ending.callback(inference.stop)
    trainer = TrainerGroup.start(config, options[:shards], log_dir, run.start.attempt)
    ending.callback(trainer.stop)
    planned = _with_device(config, plan)
    orchestrator = OrchestratorHandle.start(planned, inference.router_factory(), options[-1], log_dir)
    ending.callback(orchestrator.stop)
    refs, names = [], []
    for room in (inference, trainer, orchestrator):
        room_refs, room_names = room.ready_refs()
        refs += room_refs
        names += room_names
    waits.get_all(refs, who=names, timeout_s=max(deadline - time.monotonic(), 1.0), log=log_dir, on_tick=progress)
    nodes = len(set(placement_group_table(group)["bundles_to_node_id"].values()))
    return Rooms(nodes, trainer, inference, orchestrator)


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
        if config.wandb.project:
            sinks.append(WandbSink(config, run.run_id, run.root.name, run.root))
        witness = JsonlSink(run.trained)
        for sink in (*sinks, witness):
            ending.callback(sink.close)
        yield Journal(sinks, witness)


def _bundle(options: dict[str, float]) -> dict[str, float]:
    named = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0)}
    return {name: amount for name, amount in named.items() if amount}


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
