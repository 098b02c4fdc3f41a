"""What computes on which device, in clusters that say they have GPUs: real Ray, vLLM. (A run on CPUs of a machine with
GPUs: test_kl_run.py.)"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from cluster_support import DECLARED_GPUS
from inference_support import START_S, make_config, random_model

from inference.actor import ReplicaActor
from inference.handle import MAX_CALLS
from orchestrator.actor import OrchestratorActor
from trainer.actor import ShardActor
from trireme.core.errors import BadInput
from trireme.process.device import VISIBLE
from trireme.process.waits import get, get_all


@pytest.fixture
def actor(ray_cluster: str) -> Any:
    """Creates an actor of a cluster with GPUs that are only declared; all end with the test."""
    actors: list[Any] = []

    def create(kind: type, gpus: int, *args: Any) -> Any:
        options = {"num_cpus": 0, "num_gpus": gpus, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
        limit = {"max_concurrency": MAX_CALLS} if kind is ReplicaActor else {}
        watched = {"concurrency_groups": {"watch": 1, "save": 2, "give": 1}} if kind is ShardActor else {}
        actors.append(ray.remote(**watched)(kind) if watched else ray.remote(kind))
        actors[-1] = actors[-1].options(**options, **limit).remote(*args)
        return actors[-1]

    yield create
    for handle in actors:
        ray.kill(handle)


@pytest.mark.long
def test_an_actor_sees_the_gpus_that_it_has_and_no_others(actor: Callable[..., Any], tmp_path: Path) -> None:
    config = make_config(tmp_path, False)
    kinds = {
        "replica": (ReplicaActor, 0, config, 0, None),
        "replica on GPUs": (ReplicaActor, 2, config, 1, None),
        "orchestrator": (OrchestratorActor, 0, config, None, None, None, None),
        "shard on a GPU": (ShardActor, 1, config, 0, None, 1, 0.0),
    }
    actors = [actor(*kind) for kind in kinds.values()]
    visible = [handle.__ray_call__.remote(lambda _self: os.environ.get(VISIBLE)) for handle in actors]
    by_kind = dict(zip(kinds, get_all(visible, owners=list(kinds), timeout_s=START_S), strict=True))
    assert [by_kind[name] for name in ("replica", "orchestrator")] == ["", ""]
    devices = f"{by_kind['replica on GPUs']},{by_kind['shard on a GPU']}".split(",")
    assert len(set(devices)) == 3
    assert set(devices) <= set(map(str, range(DECLARED_GPUS)))


def test_a_replica_that_is_to_compute_on_a_gpu_computes_nowhere_else(actor: Callable[..., Any], tmp_path: Path) -> None:
    random_model("qwen3", False, seed=0).save_pretrained(tmp_path)
    config = make_config(tmp_path, False)
    on_gpus = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": "gpu"})})
    replica = actor(ReplicaActor, 1, on_gpus, 0, None)
    with pytest.raises(BadInput, match=r"in inference replica 0 on .*CUDA_VISIBLE_DEVICES is '\d'; torch\.cuda says"):
        get(replica.start.remote(), owner="the replica", timeout_s=START_S)
