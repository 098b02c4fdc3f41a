"""Places of replicas that come and go, in a Ray cluster with GPUs that are only declared. Actors are idle ones."""

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
from cluster_support import DECLARED_GPUS as GPUS
from config_support import small
from plan_support import machines, plan

from inference import handle as group_module
from inference.handle import InferenceHandle
from trainer import handle as trainer_module
from trainer.handle import TrainerHandle
from trireme.config import Config
from trireme.plan.rl import LOOP_ROOMS
from trireme.plan.whole import Plan
from trireme.process.machine import VISIBLE
from trireme.process.ray_cluster import PlacePool, SharedGpus, reserve, see_own_gpus
from trireme.process.waits import get_all
from trireme.supervision.heartbeats import HeartbeatMonitor
from trireme.supervision.replica_manager import ReplicaManager
from trireme.supervision.roster import Roster

DEADLINE_S = 120.0
RESOURCES = {"num_cpus": 0.0, "num_gpus": 1.0}


class Idle:
    def start(self) -> None: ...


def seer() -> type:
    """Returns the class of an actor in the place of a shard or a replica, which says which GPUs it sees. Asynchronous,
    as a replica is: a replica's limit of concurrent calls would be a number of threads. A local class, whose code
    travels to the actor, because actors cannot import the modules of tests."""

    class Seer:
        def __init__(self, _config: Config, _number: int, _log_dir: Path | None, *rest: Any) -> None:
            gpus: SharedGpus | None = rest[-1]
            see_own_gpus(gpus)

        async def rendezvous(self) -> None: ...

        async def setup(self, _address: None) -> None: ...

        async def start(self) -> None: ...

        async def visible(self) -> str | None:
            return os.environ.get(VISIBLE)

    return Seer


def free_gpus(expected: int) -> float:
    """How many Ray has, once it has so many: it gives back in the background."""
    deadline = time.monotonic() + DEADLINE_S
    while (free := ray.available_resources().get("GPU", 0.0)) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return free


def all_are_placed(group: InferenceHandle) -> bool:
    refs, _ = group.ready_refs()
    return len(ray.wait(refs, num_returns=len(refs), timeout=DEADLINE_S)[0]) == len(refs)


@pytest.mark.usefixtures("ray_cluster")
def test_a_replica_that_leaves_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(_config: Config, _index: int | None, options: dict[str, Any], _log_dir: None) -> Any:
        return ray.remote(Idle).options(**options).remote()

    monkeypatch.setattr(group_module, "_create", create)
    config = small(inference={"replicas": 2})
    with ExitStack() as ending:
        _, options = reserve([RESOURCES] * 2, DEADLINE_S, lambda *_: None, ending)
        group = InferenceHandle.start(config, options, None)
        roster = Roster(time.time)
        monitor = HeartbeatMonitor(roster, 30.0, lambda *_: None)
        manager = ReplicaManager(config, group, roster, monitor, lambda *_: None, PlacePool(RESOURCES, ending))
        manager.begin()
        for _ in range(2):
            manager.scale(4)
            assert all_are_placed(group)
            assert free_gpus(0) == 0
            manager.scale(1)  # one of the two places that the run began with is kept for the next
            assert free_gpus(GPUS - 2) == GPUS - 2
        manager.scale(2)
        assert all_are_placed(group)
        assert all(PlacePool.are_there([group.options(index) for index in group.indices]))
        assert free_gpus(GPUS - 2) == GPUS - 2, "which took it"
        manager.scale(3)
        assert all_are_placed(group)
    assert free_gpus(GPUS) == GPUS


def visible(actors: list[Any]) -> list[str]:
    """Returns the GPUs that each actor sees, as CUDA does."""
    asked = [actor.visible.remote() for actor in actors]
    return get_all(asked, owners=["the actor"] * len(asked), timeout_s=DEADLINE_S)


def planned_turns(shards: int, ranks: int, gpus_per_node: int | None) -> Plan:
    resources = machines(cpus=8, gpus=GPUS)
    planned = plan(
        shards=shards,
        replicas=shards // ranks,
        resources=resources,
        placement="colocated",
        trainer={"gpus_per_node": gpus_per_node},
        inference={"tensor_parallel": ranks},
    )
    return Plan(planned.config, planned.facts, resources, LOOP_ROOMS)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("shards", "ranks", "gpus_per_node"), [(4, 2, None), (4, 2, 4), (2, 1, None)], ids=["pairs", "one place", "single"]
)
def test_each_gpu_has_a_shard_and_a_rank_of_a_replica(
    shards: int, ranks: int, gpus_per_node: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A successor gets the GPUs of the actor that was lost, and so do the shards of the next attempt."""
    monkeypatch.setattr(group_module, "ReplicaActor", seer())
    monkeypatch.setattr(trainer_module, "ShardActor", seer())
    planned = planned_turns(shards, ranks, gpus_per_node)

    def start_shards() -> tuple[TrainerHandle, list[str]]:
        trainer = TrainerHandle.start(planned.config, places["trainer"], None)
        return trainer, visible(list(trainer._actors_R))

    with ExitStack() as ending:
        _, options = reserve(planned.options, DEADLINE_S, lambda *_: None, ending, planned.places)
        assert free_gpus(GPUS - shards) == GPUS - shards
        places = planned.by_room(options)
        replicas = InferenceHandle.start(planned.config, places["inference"], None)
        ending.callback(lambda: [ray.kill(actor) for actor in replicas.replicas.values()])
        trainer, of_shards = start_shards()
        of_replicas = visible(list(replicas.replicas.values()))
        assert len(set(of_shards)) == shards
        assert set(of_shards) <= set(map(str, range(GPUS)))
        assert ",".join(of_replicas).split(",") == of_shards

        last = replicas.indices[-1]
        replicas.replace(last, same_actor=False)
        assert visible([replicas.replicas[last]]) == of_replicas[-1:], "beside shards that live"
        for actor in trainer._actors_R:
            ray.kill(actor)
        trainer, again = start_shards()
        assert again == of_shards, "beside replicas that live"
        for actor in trainer._actors_R:
            ray.kill(actor)
    assert free_gpus(GPUS) == GPUS
