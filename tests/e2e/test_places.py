"""Places of replicas that come and go, in a Ray cluster with GPUs that are only declared. Actors are idle ones."""

import time
from contextlib import ExitStack
from typing import Any

import pytest
import ray
from cluster_support import DECLARED_GPUS as GPUS
from config_support import small

from inference import handle as group_module
from inference.handle import InferenceHandle
from trireme.config import Config
from trireme.process.ray_cluster import PlacePool, reserve
from trireme.supervision.heartbeats import HeartbeatMonitor
from trireme.supervision.replica_manager import ReplicaManager
from trireme.supervision.roster import Roster

DEADLINE_S = 60.0
RESOURCES = {"num_cpus": 0.0, "num_gpus": 1.0}


class Idle:
    def start(self) -> None: ...


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
