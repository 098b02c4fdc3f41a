"""A cluster whose Ray was started with a bare environment: what a run takes there reaches its actors, secrets are in no
file, and a driver outside of the cluster submits a run, which is stopped with a checkpoint and resumed.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_support import STOP_S, UNNEEDED, ask, assert_gone, free_port
from run_support import DEADLINE_S, ROOT, TINY

from trireme.checkpoint.store import CheckpointStore
from trireme.process.worker_environment import PREFIXES

CPUS = 4
GRACE_S = 100
SOURCE = str(ROOT / "src")
"""The code of the driver. Nodes import what is installed in their environment, which may be another copy."""
SECRET = f"judge-{secrets.token_hex(12)}"
PROBE = """
import json, os, sys
from pathlib import Path
from trireme.config.load import load
from trireme.process.environ import Resources, prepare_ray_environment

config = load(sys.argv[1:]).config
prepare_ray_environment(config.cluster.address, 1, False)
from trireme.process.ray_cluster import ray_cluster
import ray

def look():
    import orchestrator, travelled_games, trireme
    modules = (orchestrator, travelled_games, trireme)
    return {"environ": dict(os.environ), "files": [module.__file__ for module in modules], "word": travelled_games.WORD}

class Probe:
    def look(self):
        return look()

with ray_cluster(config, Resources.of_this_machine()):
    env = {"env_vars": {"OMP_NUM_THREADS": "3"}}  # as a plan gives to each actor that computes
    print("seen", json.dumps(ray.get(ray.remote(Probe).options(num_cpus=1, runtime_env=env).remote().look.remote())))
"""


@dataclass(frozen=True)
class BareCluster:
    """A cluster of one node, with a job server."""

    address: str
    dashboard: str
    environ: dict[str, str]
    directory: Path

    def job(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs `ray job`, as from another machine."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", words[0], f"--address={self.dashboard}"]
        options = {"env": self.environ, "capture_output": True, "text": True, "timeout": DEADLINE_S}
        process = subprocess.run([*command, *words[1:]], **options)
        assert process.returncode == 0, process.stdout + process.stderr
        return process


@pytest.fixture(scope="module")
def cluster() -> Iterator[BareCluster]:
    mark = f"TRIREME_TEST_MARK={secrets.token_hex(16)}"
    with tempfile.TemporaryDirectory(prefix="tr-", ignore_cleanup_errors=True) as directory:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith((*PREFIXES, "PYTHONPATH", "RAY_"))
        }
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # As the launch files start Ray on a node: `uv run` in a job uses the environment that is there.
        fixed = {"UV_PROJECT_ENVIRONMENT": sys.prefix, "UV_NO_SYNC": "1", "RAY_JOB_STOP_WAIT_TIME_S": str(GRACE_S)}
        environ = {**inherited, **token, **fixed, "TMPDIR": directory}
        port, dashboard = free_port(), free_port()
        ports = {"port": port, "dashboard-port": dashboard}
        ports |= {name: free_port() for name in ("dashboard-agent-listen-port", "ray-client-server-port")}
        flags = ["--head", f"--num-cpus={CPUS}", f"--temp-dir={directory}", *(f"--{k}={v}" for k, v in ports.items())]
        flags += UNNEEDED
        started = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *flags],
            env={**environ, **dict([mark.split("=")])},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with pytest.MonkeyPatch.context() as patched:
                for name, value in token.items():
                    patched.setenv(name, value)
                assert any(ask(f"127.0.0.1:{port}", "ray.cluster_resources()['CPU']", float(CPUS)) for _ in range(5))
            yield BareCluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", environ, Path(directory))
        finally:
            started.terminate()
            started.wait(STOP_S)
        assert_gone(mark)


def test_variables_code_and_secrets_reach_actors_and_no_file_has_a_secret(cluster: BareCluster, tmp_path: Path) -> None:
    (tmp_path / "travelled_games.py").write_text("from travelled_words import WORD\n")
    (tmp_path / "travelled_words.py").write_text("WORD = 'bireme'\n")
    config = ["--env.id", "travelled_games:Game", "--model.name", "m", "--orchestrator.batch-size", "4"]
    config += ["--inference.sampling.max-tokens", "4", "--cluster.address", cluster.address]
    config += ["--cluster.variables", '["JUDGE_URL", "JUDGE_API_KEY"]']
    variables = {
        "HF_HOME": "/hf",
        "NCCL_DEBUG": "INFO",
        "JUDGE_URL": "http://judge",
        "PYTHONPATH": f"{SOURCE}:{tmp_path}",
    }
    environ = {**cluster.environ, **variables, "JUDGE_API_KEY": SECRET, "LEFT_BEHIND": "1"}
    process = subprocess.run(
        [sys.executable, "-c", PROBE, *config], env=environ, cwd="/", capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(process.stdout.partition("seen ")[2])
    assert {name: report["environ"].get(name) for name in variables if name != "PYTHONPATH"} == {
        name: value for name, value in variables.items() if name != "PYTHONPATH"
    }
    assert str(tmp_path) in report["environ"]["PYTHONPATH"].split(os.pathsep)
    assert report["environ"]["JUDGE_API_KEY"] == SECRET
    assert report["environ"]["OMP_NUM_THREADS"] == "3"
    assert "LEFT_BEHIND" not in report["environ"]
    assert all(file.startswith(str(cluster.directory)) for file in report["files"]), "the driver's code, not the node's"
    assert report["word"] == "bireme"
    assert SECRET not in process.stdout.partition("seen ")[0] + process.stderr
    assert files_with(SECRET, cluster.directory) == []
    assert files_with("http://judge", cluster.directory) != [], "Ray does write what is no secret"


def files_with(text: str, directory: Path) -> list[Path]:
    files = (file for file in directory.rglob("*") if file.is_file() and not file.is_symlink())
    return [file for file in files if text.encode() in file.read_bytes()]


@pytest.mark.long
def test_a_submitted_run_is_stopped_with_a_checkpoint_and_resumed(cluster: BareCluster, tmp_path: Path) -> None:
    """The working directory has a project file and a configuration, as a laptop has; the run directory is elsewhere."""
    project, outputs = tmp_path / "project", tmp_path / "outputs"
    project.mkdir()
    shutil.copy(ROOT / "pyproject.toml", project)
    text = (ROOT / "configs" / "quickstart.toml").read_text()
    (project / "run.toml").write_text(text.replace('"./assets', f'"{ROOT}/assets'))
    run = outputs / "run"
    command = ["uv", "run", "rl", "@", "run.toml", *TINY[:-2], "--run.output-dir", str(outputs), "--run.name", "run"]
    command += ["--checkpoint.every", "0", "--resume", "auto", "--max-steps"]
    environment = json.dumps({"env_vars": {"PYTHONPATH": SOURCE}})
    submit = ["submit", "--working-dir", str(project), "--runtime-env-json", environment]
    cluster.job(*submit, "--no-wait", "--submission-id", "first", "--", *command, "9999")
    until_rows(run, 2, cluster)
    cluster.job("stop", "first")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    (checkpoint,) = CheckpointStore(run).checkpoints()
    assert checkpoint.name == f"step_{len(rows):06d}", "ray job stop waits for the checkpoint"
    assert json.loads((run / "STATUS").read_text())["ended"]["exit_code"] == 75

    printed = cluster.job(*submit, "--submission-id", "second", "--", *command, str(len(rows) + 1)).stdout
    assert f"resumed from {checkpoint}" in printed
    again = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    assert again == list(range(len(rows) + 1))


def until_rows(run: Path, number: int, cluster: BareCluster) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < number:
        assert time.monotonic() < deadline, cluster.job("logs", "first").stdout
        time.sleep(0.3)
