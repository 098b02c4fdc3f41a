"""Launch files: filled in from the configuration and its plan, whole, and equal to those that are shipped.

`TRIREME_KUBERAY_CRDS` names a directory with KubeRay's `ray.io_rayjobs.yaml` and `ray.io_rayclusters.yaml` (its
`ray-operator/config/crd/bases`); without it the manifests are not compared with their schemas. KUBERAY_CRDS has the
digests of those that they were last compared with, of KubeRay 1.7.0 (19 August 2026).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gpu_check.shapes import SHAPES
from trireme.cli import launch as command
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts
from trireme.core.errors import BadInput
from trireme.plan.needs import VERSIONS
from trireme.plan.rl import RL_ROOMS
from trireme.tools.launch_files import KINDS, SHARED, launch_file, node_request

ROOT = Path(__file__).parents[3]
QWEN3_8B = {
    **SHAPES["4b"],
    **{"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}
SHIPPED = ["@", "configs/qwen3-8b-2x8gpu.toml"]
"""The configuration of the files in scripts/, which are for its two nodes."""
KUBERAY_CRDS = {
    "ray.io_rayjobs.yaml": "01a5cf3b17c1769fda44af7e82debcd98722f0c27b9ab84d084681c6649121f5",
    "ray.io_rayclusters.yaml": "c44704442eef0c6721ad40c1d66782c8bd3fdab9d3344306a5820910a679baa1",
}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def made(kind: str, *flags: str, nodes: int = 2, gpus: int | None = None) -> str:
    config = load([*SHIPPED, *flags], {}).config
    facts = ModelFacts.from_json(config.model.name, json.dumps({**QWEN3_8B, "dtype": "bfloat16"}))
    request = node_request(config, facts, RL_ROOMS, nodes, gpus)
    return launch_file(kind, "rl", [*SHIPPED, *flags], config, request, nodes, "trireme:latest")


@pytest.mark.parametrize(("kind", "file"), KINDS.items())
def test_the_shipped_files_are_what_the_command_prints(kind: str, file: str) -> None:
    assert (ROOT / "scripts" / file).read_text() == made(kind), f"uv run trireme launch {kind} .. > scripts/{file}"


class TestRequest:
    def test_the_fewest_gpus_with_which_all_blocks_fit(self) -> None:
        config = load(SHIPPED, {}).config
        facts = ModelFacts.from_json(config.model.name, json.dumps({**QWEN3_8B, "dtype": "bfloat16"}))

        def gpus(nodes: int, *flags: str) -> int:
            return node_request(load([*SHIPPED, *flags], {}).config, facts, RL_ROOMS, nodes, None).gpus

        assert [gpus(1), gpus(2), gpus(3)] == [16, 8, 8]
        assert gpus(4, "--trainer.gpus-per-node", "4") == 4
        assert gpus(2, "--inference.replicas", "1", "--inference.tensor-parallel", "8") == 8

    def test_too_few_are_refused(self) -> None:
        with pytest.raises(BadInput, match=r"2 nodes with 4 GPUs each(.|\n)*16 processes"):
            made("slurm", gpus=4)

    def test_shared_memory_holds_two_versions_of_the_weights(self) -> None:
        config = load(SHIPPED, {}).config
        facts = ModelFacts.from_json(config.model.name, json.dumps({**QWEN3_8B, "dtype": "bfloat16"}))
        request = node_request(config, facts, RL_ROOMS, 2, None)
        versions = 2 * 2 * facts.num_parameters
        assert versions < request.store_bytes < request.shm_gib * 2**30 < 1.3 * versions
        assert request.memory_gib > request.shm_gib, VERSIONS

    def test_where_weights_are_broadcast_the_object_store_has_room_for_the_rest(self) -> None:
        config = load(["@", "configs/quickstart.toml", "--inference.transport", "broadcast"], {}).config
        facts = ModelFacts.from_json(config.model.name, json.dumps(QWEN3_8B))
        assert node_request(config, facts, RL_ROOMS, 2, None).store_bytes == 2**30


def test_without_gpus_none_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in KINDS:
        assert command.main([kind, "@", "configs/quickstart.toml", "--nodes", "2"]) == 0
        printed = capsys.readouterr().out
        assert "nvidia.com/gpu" not in printed
        assert "--gpus-per-node" not in printed
        assert "accelerators" not in printed


def test_another_command_and_a_name_that_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["@", "configs/sft-base.toml", "--run.name", "Mine_1"]
    command.main(["slurm", "sft", *given, "--nodes", "1"])
    printed = capsys.readouterr().out
    assert "uv run sft @ configs/sft-base.toml --run.name Mine_1 --resume auto" in printed
    assert "#SBATCH --job-name=mine-1\n" in printed
    assert f"trireme launch slurm sft {shlex.join(given)} --nodes 1" in printed


@pytest.mark.parametrize(
    ("name", "expected"), [("2026-11", "run-2026-11"), ("Null_", "null"), ("実験", "run"), ("a" * 80, "a" * 47)]
)
def test_every_name_is_one_that_kubernetes_takes(name: str, expected: str) -> None:
    for kind in ("rayjob", "raycluster"):
        assert yaml.safe_load(made(kind, "--run.name", name))["metadata"]["name"] == expected
    assert yaml.safe_load(made("skypilot", "--run.name", name))["name"] == expected


def test_the_file_says_how_it_is_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rayjob", "@", "configs/quickstart.toml", "--gpus-per-node", "8", "--image", "registry/trireme:1"]
    command.main([*words, "--nodes", "1"])
    assert f"# Printed by: uv run trireme launch {shlex.join(words)} --nodes 1\n" in capsys.readouterr().out


def test_a_path_with_spaces_is_one_word() -> None:
    text = made("rayjob", "--run.output-dir", "my runs")
    words = shlex.split(yaml.safe_load(text)["spec"]["entrypoint"])
    assert words[words.index("--run.name") - 1] == "/shared/my runs"


def test_a_run_in_object_storage_works_in_a_directory_that_outlives_the_job() -> None:
    text = made("rayjob", "--run.output-dir", "s3://bucket/runs")
    words = shlex.split(yaml.safe_load(text)["spec"]["entrypoint"])
    assert words[words.index("--run.output-dir") + 1] == "s3://bucket/runs"
    assert words[words.index("--run.local-dir") + 1] == "/shared/outputs"


@pytest.mark.parametrize("place", ["~/outputs", "../outputs"])
def test_a_directory_outside_of_the_shared_volume_is_refused(place: str) -> None:
    with pytest.raises(BadInput, match=r"run\.output_dir"):
        made("rayjob", "--run.output-dir", place)
    assert place in made("slurm", "--run.output-dir", place), "a job there starts in the repository, as its user"


@pytest.mark.parametrize("words", [["slurm"], ["moon", "--nodes", "1"], ["slurm", "--nodes", "0"]])
def test_what_cannot_be_printed_is_refused(words: list[str]) -> None:
    with pytest.raises(BadInput):
        command.main([*words, "@", "configs/quickstart.toml"])


class TestSlurm:
    def test_it_is_short_and_names_what_follows_from_the_configuration(self) -> None:
        text = made("slurm", "--checkpoint.grace-s", "200")
        assert len(text.splitlines()) < 80
        assert "#SBATCH --signal=B:TERM@230\n" in text
        assert "#SBATCH --nodes=2\n" in text
        assert "#SBATCH --gpus-per-node=8\n" in text
        assert "RAY_JOB_STOP_WAIT_TIME_S=230" in text
        assert re.search(r"@[A-Z_]+@", text) is None, "something was not filled in"

    def test_shellcheck(self, tmp_path: Path) -> None:
        shellcheck = Path(sys.executable).with_name("shellcheck")  # of the group `dev`
        file = tmp_path / "run.sbatch"
        file.write_text(made("slurm"))
        checked = subprocess.run([str(shellcheck), str(file)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


class TestKubernetes:
    def manifest(self, kind: str, *flags: str) -> dict[str, Any]:
        loaded: dict[str, Any] = yaml.safe_load(made(kind, *flags))
        return loaded

    def groups(self, kind: str, *flags: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The pod specifications of the head and of the workers."""
        spec = self.manifest(kind, *flags)["spec"]
        cluster = spec.get("rayClusterSpec", spec)
        (workers,) = cluster["workerGroupSpecs"]
        assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
        return cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]

    @pytest.mark.parametrize("kind", ["rayjob", "raycluster"])
    def test_pods_live_long_enough_to_commit(self, kind: str) -> None:
        for pod in self.groups(kind, "--checkpoint.grace-s", "100"):
            (container,) = pod["containers"]
            environ = {each["name"]: each["value"] for each in container["env"]}
            assert 100 < int(environ["RAY_JOB_STOP_WAIT_TIME_S"]) < pod["terminationGracePeriodSeconds"]
            stops = container["lifecycle"]["preStop"]["exec"]["command"]
            assert stops[-1] == environ["RAY_JOB_STOP_WAIT_TIME_S"]

    @pytest.mark.parametrize("kind", ["rayjob", "raycluster"])
    def test_pods_share_a_volume_and_have_shared_memory_and_tokens(self, kind: str) -> None:
        for pod in self.groups(kind):
            (container,) = pod["containers"]
            volumes = {each["name"]: each for each in pod["volumes"]}
            mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
            assert mounts == {"shared": SHARED, "shm": "/dev/shm"}
            assert "persistentVolumeClaim" in volumes["shared"]
            assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
            shm = int(volumes["shm"]["emptyDir"]["sizeLimit"].removesuffix("Gi"))
            assert shm < int(container["resources"]["limits"]["memory"].removesuffix("Gi")), "it counts as memory"
            assert container["envFrom"][0]["secretRef"]["name"] == "trireme"
            assert container["resources"]["limits"] == container["resources"]["requests"]

    def test_the_run_of_a_job(self) -> None:
        entrypoint = self.manifest("rayjob")["spec"]["entrypoint"]
        assert entrypoint.startswith(f"uv run rl @ configs/qwen3-8b-2x8gpu.toml --run.output-dir {SHARED}/outputs ")
        assert entrypoint.endswith("--resume auto")
        load(shlex.split(entrypoint)[3:], {})
        assert "entrypoint" not in self.manifest("raycluster")["spec"]

    @pytest.mark.parametrize(
        ("kind", "file"), [("rayjob", "ray.io_rayjobs.yaml"), ("raycluster", "ray.io_rayclusters.yaml")]
    )
    def test_the_schema_of_the_resource_definition(self, kind: str, file: str) -> None:
        directory = os.environ.get("TRIREME_KUBERAY_CRDS")
        if directory is None:  # the tests around this one look at the structure of the manifests without these files
            pytest.skip("TRIREME_KUBERAY_CRDS is not set")  # reason: KubeRay's files are in no package and not ours
        text = (Path(directory) / file).read_bytes()
        assert hashlib.sha256(text).hexdigest() == KUBERAY_CRDS[file], "another release: compare, and record its digest"
        versions = yaml.load(text, yaml.CSafeLoader)["spec"]["versions"]
        (schema,) = (each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1")
        jsonschema.validate(self.manifest(kind), _strict(schema))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**self.manifest(kind), "spec": {"rayVersion": 2}}, _strict(schema))


def _strict(schema: Any) -> Any:
    """Makes a schema as strict as the API server with strict field validation: unknown fields are errors, and integers
    may stand for strings where the schema says so."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items()}
    if found.pop("x-kubernetes-int-or-string", False):
        found.pop("type", None)
    if isinstance(found.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in found:
        found.setdefault("additionalProperties", False)
    return found


def test_skypilot() -> None:
    task = yaml.safe_load(made("skypilot"))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    assert task["secrets"]["RAY_AUTH_TOKEN"] is None, "it is given when the job is started"
    assert "--resume auto --cluster.address" in task["run"]
    syntax = subprocess.run(["bash", "-n"], input=task["run"], text=True, capture_output=True, check=False)
    assert syntax.returncode == 0, syntax.stderr
