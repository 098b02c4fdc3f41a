"""The manifest for KubeRay: what its pods share, and the run that it starts."""

import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from trireme.config.load import load

ROOT = Path(__file__).parents[3]
JOB: dict[str, Any] = yaml.safe_load((ROOT / "scripts" / "rayjob.yaml").read_text())
CLUSTER = JOB["spec"]["rayClusterSpec"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
GROUPS = {"head": CLUSTER["headGroupSpec"], "workers": WORKERS}


def test_the_run_lies_on_the_shared_volume_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    uv, run, command, *words = shlex.split(JOB["spec"]["entrypoint"])
    assert (uv, run, command) == ("uv", "run", "rl")
    config = load(words, {}).config
    assert config.run.output_dir == "/shared/outputs"
    assert config.run.name == JOB["metadata"]["name"]
    assert words[-2:] == ["--resume", "auto"]
    gpus = int(WORKERS["rayStartParams"]["num-gpus"]) * WORKERS["replicas"]
    assert gpus == config.trainer.shards + config.inference.replicas
    assert WORKERS["replicas"] == WORKERS["minReplicas"] == WORKERS["maxReplicas"]
    (container,) = CLUSTER["headGroupSpec"]["template"]["spec"]["containers"]
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(environ["RAY_JOB_STOP_WAIT_TIME_S"]) > config.checkpoint.grace_s


@pytest.mark.parametrize("group", GROUPS)
def test_pods_share_a_volume_and_have_memory_for_the_object_store(group: str) -> None:
    pod = GROUPS[group]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
    assert "persistentVolumeClaim" in volumes["shared"]
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    shm_gib = int(volumes["shm"]["emptyDir"]["sizeLimit"].removesuffix("Gi"))
    memory_gib = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    store_bytes = int(GROUPS[group]["rayStartParams"]["object-store-memory"])
    assert store_bytes < shm_gib * 2**30 < memory_gib * 2**30, "/dev/shm counts as memory"
    assert container["envFrom"][0]["secretRef"]["name"] == "trireme"
    assert container["resources"]["limits"] == container["resources"]["requests"]


def test_it_asks_for_the_installed_ray_and_a_token() -> None:
    assert CLUSTER["rayVersion"] == version("ray")
    assert CLUSTER["authOptions"] == {"mode": "token"}
