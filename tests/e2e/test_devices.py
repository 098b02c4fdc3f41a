"""What computes on which device, in clusters that say they have GPUs: real Ray, vLLM. (A run on CPUs of a machine with
GPUs: test_kl_run.py.)"""

from pathlib import Path
from typing import Any

import pytest
import ray
from inference_support import START_S, make_config, random_model

from inference.actor import ReplicaActor
from inference.handle import MAX_CALLS
from trireme.core.errors import BadInput
from trireme.process.waits import get


def test_a_replica_that_is_to_compute_on_a_gpu_computes_nowhere_else(ray_cluster: str, tmp_path: Path) -> None:
    """The cluster has GPUs, as far as Ray knows."""
    random_model("qwen3", False, seed=0).save_pretrained(tmp_path)
    config = make_config(tmp_path, False)
    on_gpus = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": "gpu"})})
    options: dict[str, Any] = {"num_gpus": 1, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    actor = ray.remote(ReplicaActor).options(num_cpus=0, max_concurrency=MAX_CALLS, **options)
    replica = actor.remote(on_gpus, 0, None)
    message = r"in inference replica 0 on .*CUDA_VISIBLE_DEVICES is '\d'; torch\.cuda says"
    try:
        with pytest.raises(BadInput, match=message):
            get(replica.start.remote(), owner="the replica", timeout_s=START_S)
    finally:
        ray.kill(replica)
