"""The Slurm script on namespaces as nodes: Ray, the driver and the names of nodes are real;
srun, scontrol and the `uv` of the batch shell are stubs that enter the namespaces."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from namespaces import ALL, Fabric, fabric, not_possible
from nodes_support import DEADLINE_S, assert_steps_once
from resume_support import rows_of
from run_support import ROOT, TINY

from trireme.checkpoint.store import CheckpointStore
from trireme.core.errors import EXIT_OK, EXIT_SIGTERM

# reason: a node is a set of namespaces, which need root and iproute2
without = pytest.mark.skipif(bool(not_possible()), reason=not_possible())
pytestmark = [pytest.mark.long, without]

SCRIPT = ROOT / "scripts" / "slurm.sbatch"
JOB, STEPS, GRACE_S = "1234", 40, 30
"""A machine that is taken back has 30 s to end."""
ENTERS = f"""#!{sys.executable}
import json, os, signal, subprocess, sys
import psutil
words = sys.argv[1:]
stub, nodes = os.path.basename(sys.argv[0]), json.loads(os.environ["STUB_NODES"])
with open(os.environ["STUB_CALLS"], "a") as calls:
    print(stub, *words, file=calls)
if stub == "scontrol":
    if words[0] == "show":
        print(*os.environ["SLURM_JOB_NODELIST"].split(","), sep="\\n")
    sys.exit()
node = os.environ["SLURM_JOB_NODELIST"].split(",")[0]  # where Slurm runs the batch shell
if stub == "srun":
    while words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        node = value if name == "--nodelist" else node
else:
    words = ["uv", *words]
own = {{"PATH": os.environ["STUB_PATH"], "HOME": "/tmp/home", "TMPDIR": "/tmp"}}
enter = ["nsenter", "--target", str(nodes[node]), *{ALL!r}, "env", "-C", os.getcwd(), *words]
task = subprocess.Popen(enter, env={{**os.environ, **own}})
def forward(number, _frame):
    for child in psutil.Process(task.pid).children():
        child.send_signal(number)
signal.signal(signal.SIGTERM, forward)
code = task.wait()
sys.exit(code if code >= 0 else 128 - code)
"""


@dataclass
class Slurm:
    """What the stubs stand for."""

    directory: Path
    net: Fabric

    @property
    def calls(self) -> list[str]:
        return (self.directory / "calls").read_text().splitlines()

    def environ(self, nodes: Sequence[str]) -> dict[str, str]:
        binaries = self.directory / "bin"
        binaries.mkdir(exist_ok=True)
        for name in ("srun", "scontrol", "uv"):
            (binaries / name).write_text(ENTERS)
            (binaries / name).chmod(0o755)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        stubs = {
            "STUB_NODES": json.dumps({node.name: node.pid for node in self.net.nodes}),
            "STUB_CALLS": str(self.directory / "calls"),
            "STUB_PATH": path,
        }
        job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": JOB, "SLURM_CPUS_PER_TASK": "3", "TRIREME_STORE_GB": "1"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        nodelist = {"SLURM_JOB_NODELIST": ",".join(nodes)}
        return {
            **inherited,
            **stubs,
            **job,
            **nodelist,
            "PATH": f"{binaries}:{path}",
            "UV_PROJECT_ENVIRONMENT": sys.prefix,
        }

    def submit(self, nodes: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        place = ["--run.output-dir", str(self.directory / "outputs"), "--run.name", "run", "--resume", "auto"]
        sizes = ["--max-steps", str(STEPS), "--trainer.shards", "2", "--inference.replicas", "2"]
        run = ["rl", "@", "configs/quickstart.toml", *TINY, *sizes, "--checkpoint.grace-s", str(GRACE_S), *place]
        with output.open("wb") as file:
            return subprocess.Popen(["bash", str(SCRIPT), *run], env=self.environ(nodes), stdout=file, stderr=file)


def until_rows(job: subprocess.Popen[bytes], run: Path, count: int, output: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(rows_of_running(run)) < count:
        assert job.poll() is None, output.read_text()[-3000:]
        assert time.monotonic() < deadline, output.read_text()[-3000:]
        time.sleep(0.2)


def rows_of_running(run: Path) -> list[Mapping[str, Any]]:
    file = run / "metrics.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def test_a_job_before_its_time_limit_commits_and_the_same_file_on_other_nodes_continues_it(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "run"
    with fabric(3, [tmp_path], shm_mb=1500) as net:
        slurm = Slurm(tmp_path, net)
        first = slurm.submit(["node0", "node1"], tmp_path / "first.txt")
        try:
            until_rows(first, run, 3, tmp_path / "first.txt")
            since = time.monotonic()
            first.send_signal(signal.SIGTERM)  # to the batch shell alone, as `--signal=B:TERM` does
            assert first.wait(DEADLINE_S) == EXIT_SIGTERM, (tmp_path / "first.txt").read_text()[-3000:]
            print(f"ended {time.monotonic() - since:.1f} s after SIGTERM")
        finally:
            first.kill()
        assert slurm.calls[-1] == f"scontrol requeue {JOB}"
        steps = len(rows_of(run / "metrics.jsonl"))
        (commit,) = CheckpointStore(run).commits()
        assert commit.name == f"step_{steps:06d}", "it had committed before it ended"
        assert "2 nodes have joined 10.77.0.1:" in (tmp_path / "first.txt").read_text()
        for node in net.nodes[:2]:
            output = node.run("pgrep", "-f", "raylet|trireme.cli").stdout
            assert output == "", f"Ray and the driver have ended on {node.name}"

        second = slurm.submit(["node2", "node1"], tmp_path / "second.txt")
        try:
            code = second.wait(DEADLINE_S)
        finally:
            second.kill()
        text = " ".join((tmp_path / "second.txt").read_text().split())
        assert code == EXIT_OK, text[-3000:]
        assert "2 nodes have joined 10.77.0.3:" in text
        assert f"resumed from {commit}" in text
        assert "the job ended with code 0 after no signal" in text
        assert_steps_once(rows_of(run / "metrics.jsonl"), STEPS, bound=1)
        assert sum(call.startswith("scontrol requeue") for call in slurm.calls) == 1
