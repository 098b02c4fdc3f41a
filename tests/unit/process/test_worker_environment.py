"""What a run takes with it to the nodes of a cluster: which variables, which code, and that secrets are never shown.
(Through a real cluster: tests/e2e/test_job.py.)"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from plan_support import plan

import trireme
from trireme.config import Config
from trireme.config.run import RunConfig
from trireme.core.errors import BadInput
from trireme.process.worker_environment import ENTRY, OWN_PACKAGES, WorkerEnvironment, modules_not_installed

TOKEN = "not-in-the-format-of-any-service"


def config(
    env: str = "sort", loss: str | None = None, variables: tuple[str, ...] = (), of_env: tuple[str, ...] = ()
) -> Config:
    planned = plan().config
    return Config.model_validate(
        {
            **planned.model_dump(mode="json"),
            "env": [{"id": env, "variables": list(of_env)}],
            "trainer": {**planned.trainer.model_dump(), "loss_fn": loss},
            "cluster": {"address": "10.0.0.1:6379", "variables": list(variables)},
        }
    )


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a module that imports another one, and a package."""
    (tmp_path / "travelled_games.py").write_text("import os\nimport numpy\nfrom travelled_words import WORDS\n")
    (tmp_path / "travelled_words.py").write_text("WORDS = ()\nimport travelled_nowhere\n")
    package = tmp_path / "travelled_losses" / "kinds"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "clipped.py").write_text("def loss(: broken\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestVariables:
    def test_those_of_libraries_and_of_this_project_travel_with_absolute_paths(self, directory: Path) -> None:
        environ = {
            "HF_HOME": "/hf",
            "NCCL_DEBUG": "INFO",
            "TRIREME_FAULTS": "x",
            "VLLM_X": "1",
            "GLOO_SOCKET_IFNAME": "e",
            "UCX_TLS": "rc",
            "FI_PROVIDER": "efa",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        unrelated = {
            "PATH": "/bin",
            "HOME": "/root",
            "CUDA_VISIBLE_DEVICES": "0",
            "CUDA_HOME": "/usr/local/cuda",
            "TRIREME__SEED": "1",
            "RAY_ADDRESS": "a",
            "VLLM_HOST_IP": "10.0.0.1",
        }
        environment = WorkerEnvironment.of(config(), environ | unrelated | {"PYTHONPATH": "src:/opt/code:"})
        assert environment.variables == environ | {"PYTHONPATH": f"{directory}/src:/opt/code"}
        assert environment.secrets == {}

    def test_those_of_object_storage_travel_with_a_run_there_and_are_not_shown(self) -> None:
        environ = {"AWS_REGION": "some-region", "GOOGLE_SERVICE_ACCOUNT": "account", "AZURE_CLIENT_ID": "client"}
        stored = config().model_copy(update={"run": RunConfig(output_dir="s3://bucket/runs")})
        environment = WorkerEnvironment.of(stored, environ | {"PATH": "/bin"})
        assert environment.secrets == environ
        assert environment.variables == {}
        assert not [value for value in environ.values() if value in f"{environment!r}{environment.text}"]
        assert WorkerEnvironment.of(config(), environ).secrets == {}, "a run in a directory needs none"

    def test_those_that_the_configuration_and_its_environments_name_travel(self) -> None:
        for names in (config(variables=("JUDGE_URL",)), config(of_env=("JUDGE_URL", "JUDGE_PASSWORD"))):
            environment = WorkerEnvironment.of(names, {"JUDGE_URL": "1", "OTHER": "1"})
            assert (environment.variables, environment.secrets) == ({"JUDGE_URL": "1"}, {})
        assert WorkerEnvironment.of(config(of_env=("JUDGE_PASSWORD",)), {"JUDGE_PASSWORD": TOKEN}).secrets != {}
        with pytest.raises(BadInput, match=r"cluster\.variables names JUDGE_URL"):
            WorkerEnvironment.of(config(variables=("JUDGE_URL",)), {})

    @pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "JUDGE_PASSWORD"])
    def test_secrets_are_apart_and_never_shown(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        environ = {name: TOKEN, "HF_HOME": "/hf"}
        environment = WorkerEnvironment.of(config(variables=(name,)), environ)
        assert (environment.secrets, environment.variables) == ({name: TOKEN}, {"HF_HOME": "/hf"})
        assert name in environment.text
        for shown in (repr(environment), environment.text, repr(environment.runtime_env(environ))):
            assert TOKEN not in shown
        monkeypatch.setenv(name, "another one")
        environment.runtime_env({})["worker_process_setup_hook"]()
        assert os.environ[name] == TOKEN


class TestCode:
    def test_the_project_travels_with_what_is_named_and_imported(self, directory: Path) -> None:
        names = [path.name for path in modules_not_installed([])]
        assert names == [ENTRY, *OWN_PACKAGES]
        assert modules_not_installed([])[1] == Path(trireme.__file__).parent
        environment = WorkerEnvironment.of(config("travelled_games:Game", "travelled_losses.kinds.clipped:loss"), {})
        local = {path for path in environment.modules if path.is_relative_to(directory)}
        assert local == {directory / name for name in ("travelled_games.py", "travelled_words.py", "travelled_losses")}
        assert "travelled_games" in environment.text

    @pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
    def test_packages_of_system_and_user_stay(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        """An environment may see them beside its own (`--system-site-packages`)."""
        (tmp_path / name / "travelled_torch").mkdir(parents=True)
        (tmp_path / name / "travelled_torch" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path / name)
        assert modules_not_installed(["travelled_torch"]) == modules_not_installed([])


def test_the_plan_names_what_travels_to_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert "travels" not in dict(plan().rows())
    row = dict(replace(plan(), config=config()).rows())["travels"]
    assert "NCCL_DEBUG" in row
    assert "HF_TOKEN" in row
    assert TOKEN not in row
    assert "code of _trireme_entry, trireme, trainer, orchestrator, inference, service;" in row
