"""The Slurm script, with stubs of srun, scontrol, getent and uv that write down how they were called: in which
order it starts what, how it ends by each signal and exit code, when it asks for a new start."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from trireme.config.load import load

SCRIPT = Path(__file__).parents[3] / "scripts" / "slurm.sbatch"
DEADLINE_S = 60
STUBS = {
    "scontrol": 'echo "scontrol $*" >> calls; if [ "$1" = show ]; then printf "node-a\\nnode-b\\n"; fi',
    "getent": 'echo "127.0.0.2 STREAM node-a"',
    # Runs the command here, as srun does on the node that is named, without the directory that is made before it.
    "srun": """
shift 3; node=${1#--nodelist=}; shift; echo "on $node: $*" >> calls
[ "$1" = bash ] && shift 4
exec "$@"
""",
    "uv": """
shift
case "$1" in
    ray) echo $$ >> services; exec sleep 1000 ;;
    python)  # it finds that these nodes have started Ray
        shift 3
        for _ in {1..600}; do [ "$(wc -l < services)" -ge $(($# - 1)) ] && break; sleep 0.05; done
        echo "joining $*" >> calls
        [ $# = 2 ] && exit 0  # the head alone
        case "${JOINING:-all}" in
            all) exit 0 ;;
            waits) touch started; exec sleep 1000 ;;
            late)  # node-b is there at the second look
                if [ -e late ]; then exit 0; fi
                touch late ;;
        esac
        echo node-b; exit 1 ;;
    sft) echo "driver $*" >> calls ;;
    rl) echo "driver $*" >> calls
        trap 'echo "driver got TERM" >> calls; sleep 0.2; exit "$STOPPED"' TERM
        touch started
        if [ -n "${ENDS:-}" ]; then exit "$ENDS"; fi
        while true; do sleep 0.05; done ;;
esac
""",
}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job in a directory of its own."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, text in STUBS.items():
        (binaries / name).write_text(f"#!/bin/bash\n{text}\n")
        (binaries / name).chmod(0o755)
    (tmp_path / "calls").touch()
    (tmp_path / "services").touch()
    return {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_CPUS_PER_TASK": "4",
        "STOPPED": "75",
    }


def run(
    job: dict[str, str], *signals: signal.Signals, command: Sequence[str] = (), **environ: str
) -> tuple[int, list[str]]:
    """Runs it to its end, with these signals to the batch shell alone once the driver has started."""
    directory = Path(job["SLURM_SUBMIT_DIR"])
    with (directory / "output").open("w") as output:
        shell = subprocess.Popen(
            ["bash", str(SCRIPT), *command],
            env={**job, **environ},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        for number in signals:
            deadline = time.monotonic() + DEADLINE_S
            while not (directory / "started").exists():
                assert time.monotonic() < deadline, (directory / "output").read_text()
                time.sleep(0.02)
            shell.send_signal(number)
        code = shell.wait(DEADLINE_S)
        for pid in (directory / "services").read_text().split():
            assert not Path(f"/proc/{pid}").exists(), "it left Ray's services running"
    finally:
        with suppress(ProcessLookupError):  # its stubs too, if it has not ended them
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    return code, (directory / "calls").read_text().splitlines()


def test_shellcheck() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")  # of the group `dev`
    checked = subprocess.run([str(shellcheck), str(SCRIPT)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_slurm_reads_its_options_and_the_run_can_be_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = SCRIPT.read_text().splitlines()
    first_command = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    options = [n for n, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(options) < first_command, "Slurm reads none behind a command"
    assert all("#" not in lines[n].removeprefix("#") for n in options)
    (command,) = (line for line in lines if line.startswith("command=("))
    monkeypatch.chdir(SCRIPT.parents[1])
    rl, *words = shlex.split(command.removeprefix("command=(").removesuffix(")"))
    config = load(words, {}).config
    assert rl == "rl"
    gpus = config.trainer.shards + config.inference.replicas
    assert {"#SBATCH --nodes=2", f"#SBATCH --gpus-per-node={gpus // 2}"} <= set(lines)
    (notice,) = (line for line in lines if line.startswith("#SBATCH --signal=B:TERM@"))
    assert int(notice.partition("TERM@")[2]) >= config.checkpoint.grace_s + 30


def test_another_run_may_be_given(job: dict[str, str]) -> None:
    words = ["sft", "@", "my data.toml", "--resume", "auto"]
    _, calls = run(job, command=words, SLURM_GPUS_ON_NODE="4", TRIREME_STORE_GB="2")
    (driver,) = (call for call in calls if call.startswith("driver sft"))
    assert driver.startswith("driver sft @ my data.toml --resume auto --cluster.address ")
    started = [call for call in calls if " ray start" in call]
    assert all("--num-gpus=4 --object-store-memory=2000000000" in call for call in started)
    assert len(started) == 2


def test_it_starts_ray_on_each_node_waits_for_all_and_then_starts_the_driver(job: dict[str, str]) -> None:
    code, calls = run(job, ENDS="0")
    assert code == 0
    head, worker = (
        next(call for call in calls if call.startswith(f"on {node}: bash")) for node in ("node-a", "node-b")
    )
    address = f"127.0.0.2:{20000 + 1234 % 120 * 100}"
    assert "--head" in head
    assert f"--address={address}" in worker
    assert "--node-name=node-b" in worker
    pattern = re.compile(r'mkdir -p -m 700 "\$0" && exec "\$@" (/tmp/ray-1234-[0-9a-f]{16}) uv run ray start')
    private = {match[1] for call in (head, worker) if (match := pattern.search(call))}
    assert len(private) == 1, "both have the name that nobody else guesses"
    assert f"--temp-dir={private.pop()}/r" in head
    agents = [
        call for call in (head, worker) if f"--dashboard-agent-listen-port={20000 + 1234 % 120 * 100 + 2}" in call
    ]
    assert len(agents) == 2, "however many nodes there are, it is one of the job's ports"
    first, joining = (call for call in calls if call.startswith("joining"))
    assert (first, joining) == (f"joining {address} node-a", f"joining {address} node-a node-b")
    assert calls.index(head) < calls.index(first) < calls.index(worker)
    (driver,) = (call for call in calls if call.startswith("driver rl"))
    assert driver.endswith(f"--resume auto --cluster.address {address}")
    assert calls.index(joining) < calls.index(driver)
    assert not any("requeue" in call for call in calls)


@pytest.mark.parametrize("code", [1, 2, 3, 130, 143])
def test_a_failed_run_ends_the_job_with_its_code_and_is_not_started_again(job: dict[str, str], code: int) -> None:
    code_of_job, calls = run(job, ENDS=str(code))
    assert code_of_job == code
    assert not any("requeue" in call for call in calls)


@pytest.mark.parametrize(
    ("number", "stopped", "again"),
    [(signal.SIGTERM, 75, ["scontrol requeue 1234"]), (signal.SIGTERM, 1, []), (signal.SIGINT, 75, [])],
    ids=["before the time limit", "without a checkpoint", "by the user"],
)
def test_a_stopped_run_saves_and_may_be_queued_again(
    job: dict[str, str], number: signal.Signals, stopped: int, again: list[str]
) -> None:
    code, calls = run(job, number, STOPPED=str(stopped))
    assert code == stopped
    assert calls[calls.index("driver got TERM") + 1 :] == again


@pytest.mark.parametrize(("number", "again"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_while_it_waits_for_nodes_it_ends_at_once(job: dict[str, str], number: signal.Signals, again: bool) -> None:
    code, calls = run(job, number, JOINING="waits")
    assert code == 128 + signal.SIGTERM
    assert not any(call.startswith("driver") for call in calls)
    assert calls[-1].startswith("scontrol requeue 1234" if again else "joining")


def test_a_node_that_joins_late_is_waited_for(job: dict[str, str]) -> None:
    code, calls = run(job, JOINING="late", ENDS="0")
    assert code == 0
    assert sum(call.endswith("node-a node-b") for call in calls if call.startswith("joining")) == 2
    output = (Path(job["SLURM_SUBMIT_DIR"]) / "output").read_text()
    assert "waiting for node-b to join\n2 nodes have joined 127.0.0.2:" in output


def test_a_missing_node_is_named_and_ends_it_before_the_driver_starts(job: dict[str, str]) -> None:
    code, calls = run(job, JOINING="never", TRIREME_JOIN_S="1")
    assert code == 1
    assert not any(call.startswith("driver") for call in calls)
    output = (Path(job["SLURM_SUBMIT_DIR"]) / "output").read_text()
    assert re.search(r"error: node-b did not join the Ray cluster at 127\.0\.0\.2:\d+ within 1 s", output)


def test_where_nothing_listens_no_node_has_joined() -> None:
    _, _, rest = SCRIPT.read_text().partition("compare='")
    program = rest.partition("\n'\n")[0]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        looked = subprocess.run(
            [sys.executable, "-c", program, address, "node-b", "node-a"],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert (looked.returncode, looked.stdout, looked.stderr) == (1, "node-a, node-b\n", "")
