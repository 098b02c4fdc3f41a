"""Which GPUs actors see, in a cluster that says it has some."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import inference.handle
import orchestrator.handle
import trainer.handle
from inference.handle import InferenceHandle
from orchestrator.handle import OrchestratorHandle
from trainer.handle import TrainerHandle
from trireme.config import Config
from trireme.process.waits import get_all

ON_CPU, ON_GPU = {"num_cpus": 0, "num_gpus": 0.0}, {"num_cpus": 0, "num_gpus": 1.0}
HOLDS_ONE = ["0", "1"]


def probe() -> type:
    """A class in place of the actors of all rooms: says which GPUs it sees. (Ray sends a class of a function whole.)"""

    class Probe:
        def __init__(self, *_: Any) -> None: ...

        async def start(self, *_: Any) -> str | None:
            return os.environ.get("CUDA_VISIBLE_DEVICES")

        rendezvous = setup = start

    return Probe


@pytest.fixture
def cluster_with_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a machine that may have none; all actors are probes."""
    for module, name in ((trainer.handle, "ShardActor"), (inference.handle, "ReplicaActor")):
        monkeypatch.setattr(module, name, probe())
    monkeypatch.setattr(orchestrator.handle, "OrchestratorActor", probe())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with tempfile.TemporaryDirectory(prefix="tr-") as directory:
        ray.init(
            address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=directory
        )
        yield
        ray.shutdown()


def test_an_actor_sees_the_gpus_that_it_has_and_no_others(cluster_with_gpus: None) -> None:
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
    assert sorted([shard_on_gpu, replica_on_gpu]) == HOLDS_ONE
