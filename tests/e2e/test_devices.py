"""Which GPUs actors see, in a cluster that says it has some."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_support import DECLARED_GPUS

import inference.handle
import orchestrator.handle
import trainer.handle
from inference.handle import InferenceHandle
from orchestrator.handle import OrchestratorHandle
from trainer.handle import TrainerHandle
from trireme.config import Config
from trireme.process.waits import get_all

ON_CPU, ON_GPU = {"num_cpus": 0, "num_gpus": 0.0}, {"num_cpus": 0, "num_gpus": 1.0}


def probe() -> type:
    """A class in place of the actors of all rooms: says which GPUs it sees. (Ray sends a class of a function whole.)"""

    class Probe:
        def __init__(self, *_: Any) -> None: ...

        async def start(self, *_: Any) -> str | None:
            return os.environ.get("CUDA_VISIBLE_DEVICES")

        rendezvous = setup = start

    return Probe


@pytest.fixture
def probes(ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All actors are probes, in a cluster with GPUs that are only declared."""
    for module, name in ((trainer.handle, "ShardActor"), (inference.handle, "ReplicaActor")):
        monkeypatch.setattr(module, name, probe())
    monkeypatch.setattr(orchestrator.handle, "OrchestratorActor", probe())


def test_an_actor_sees_the_gpus_that_it_has_and_no_others(probes: None) -> None:
    config = Config.model_validate(
        {
            "model": {"name": "m"},
            "env": {"id": "sort"},
            "trainer": {"shards": 2},
            "orchestrator": {"batch_size": 4},
            "inference": {"sampling": {"max_tokens": 4}},
        }
    )
    # of what a test or a user gives an actor, nothing is lost
    own = {**ON_CPU, "runtime_env": {"env_vars": {"MINE": "1"}}}
    started: Any = [
        TrainerHandle.start(config, [ON_CPU, ON_GPU], None),
        InferenceHandle.start(config, [own, ON_GPU], None),
        OrchestratorHandle.start(config, SimpleNamespace, ON_CPU, None),
    ]
    refs = [ref for room in started for ref in room.ready_refs()[0]]
    shard, shard_on_gpu, replica, replica_on_gpu, orchestrator_ = get_all(refs, who=["?"] * 5, timeout_s=120)
    assert [shard, replica, orchestrator_] == ["", "", ""]
    assert {shard_on_gpu, replica_on_gpu} < set(map(str, range(DECLARED_GPUS)))
    assert shard_on_gpu != replica_on_gpu
