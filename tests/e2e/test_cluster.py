"""An existing cluster: a head and further nodes, started by hand on this machine, a run across them, and
`trireme scale` from another terminal: a replica more that samples, one less, and nothing is lost."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest
from cluster_support import NODES, Nodes, ask, cluster_of_one
from run_support import DEADLINE_S, ROOT, TINY, Ended, assert_bound_and_conservation, run_rl

from trireme.checkpoint.store import CheckpointStore
from trireme.core.errors import EXIT_BAD_INPUT, EXIT_SIGTERM
from trireme.supervision.status import Status
from trireme.tools.timeline import json_lines

CPUS_PER_NODE = 2  # four actors of one CPU each fill both nodes
TOO_MANY = 150
SIZES = ["--trainer.shards", "2", "--trainer.gpus-per-node", "2", "--max-steps", "9999"]


@dataclass
class Told:
    """Returns what another terminal prints while the run continues."""

    second: Ended
    refused: str
    """To a request for more replicas than the memory of both nodes holds."""
    up: list[str]
    sampled: bool
    """The replica more has sampled before it had to leave."""
    down: list[str]
    nodes: dict[str, str | None]
    """Where each part is when both replicas serve."""


def scale(run: Path, replicas: int, on_line: Callable[[str], None] = lambda _: None) -> list[str]:
    """Returns the lines that the command prints; `on_line` sees each as it comes."""
    command = [sys.executable, "-m", "trireme.cli.trireme", "scale", str(run), "--replicas", str(replicas)]
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        timer = threading.Timer(DEADLINE_S, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            on_line(line)
        timer.cancel()
    return lines


def wait_for_sampling(run: Path, replica: str) -> bool:
    """Waits until the trace of `replica` has a span of sampling. Returns False if there is none after DEADLINE_S. One
    that serves for a few steps only may be asked for nothing, as another may answer before the next request comes."""
    trace, deadline = run / "trace" / "attempt_1" / f"{replica}.json", time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if any(event["name"] == "sampling" and event["ph"] == "X" for event in json_lines(trace)):
            return True
        time.sleep(0.1)
    return False


def from_another_terminal(directory: Path, nodes: Nodes) -> Told:
    """Starts a second driver, which is refused; then asks for a replica more, for which a third node is started once
    the run has trained on without it, and for one less."""
    run = directory / "run"
    meanwhile: list[str] = []

    def steps() -> int:
        return len((run / "metrics.jsonl").read_text().splitlines())

    def when_it_waits(line: str) -> None:
        if "it waits for a place in the cluster" in line and len(nodes.started) == 2:
            at_start, deadline = steps(), time.monotonic() + DEADLINE_S
            while steps() < at_start + 2 and time.monotonic() < deadline:
                time.sleep(0.1)
            meanwhile.append(f"{steps() - at_start} steps or more meanwhile")
            nodes.join()

    second = run_rl(directory, *TINY, "--resume")
    refused = "\n".join(scale(run, TOO_MANY))
    up = scale(run, 2, when_it_waits)
    sampled = wait_for_sampling(run, "inference_1")
    status = Status.read(run)
    assert status is not None
    nodes_by_part = {part.name: part.node for part in status.parts}
    return Told(second, refused, [*meanwhile, *up], sampled, scale(run, 1), nodes_by_part)


@pytest.mark.long
def test_a_run_spans_two_nodes_and_replicas_come_and_go_on_a_third(tmp_path: Path) -> None:
    reports: list[Told] = []
    with cluster_of_one(CPUS_PER_NODE) as nodes:
        nodes.join()
        assert any(ask(nodes.address, NODES, 2) for _ in range(5))

        def scale_and_stop(process: subprocess.Popen[str]) -> None:
            try:
                reports.append(from_another_terminal(tmp_path, nodes))
            finally:
                process.send_signal(signal.SIGTERM)

        def on_line(line: str, process: subprocess.Popen[str]) -> None:
            if line.split()[:2] == ["step", "1/9999"]:
                threading.Thread(target=scale_and_stop, args=(process,)).start()

        outcome = run_rl(tmp_path, *TINY, "--cluster.address", nodes.address, *SIZES, on_line=on_line)
        assert outcome.code == EXIT_SIGTERM, (reports, outcome.out)
        assert outcome.remaining == []  # of the driver's processes; those of the rooms are the cluster's
        assert ask(nodes.address, "ray.available_resources()['CPU']", 3.0 * CPUS_PER_NODE), "it left the cluster"

    (report,) = reports
    assert report.second.code == EXIT_BAD_INPUT, "the run has a driver"
    assert "is running" in report.second.out
    assert "2 nodes examined; " in outcome.out, "before the start"
    assert "rooms on 2 nodes" in outcome.out
    assert len(re.findall(r"node \S+ has \S+ GiB of memory, \S+ GiB are needed", report.refused)) == 2, report.refused
    trained, *up = report.up
    assert int(trained.split()[0]) >= 2, report.up
    assert "1 replica; 1 more to start" in up, "whoever waits for an answer is told so first"
    assert up[-1] == "2 of 2 replicas serve"
    assert report.nodes["trainer_0"] == report.nodes["trainer_1"]
    assert len({report.nodes[name] for name in ("trainer_0", "inference_0", "inference_1")}) == 3
    assert "2 replicas; 1 to leave, once they have done what they sample" in report.down
    assert report.down[-1] == "1 of 1 replicas serve"
    assert [replicas for replicas, _ in groupby(row["perf/replicas"] for row in outcome.rows)] == [1, 2, 1]
    assert report.sampled, "the new one sampled"
    assert_bound_and_conservation(outcome, bound=1)
    assert not (outcome.root / "incidents.jsonl").exists()
    assert CheckpointStore(outcome.root).checkpoints()[-1].name == f"step_{len(outcome.rows):06d}"
    assert json.loads((outcome.root / "STATUS").read_text())["ended"]["exit_code"] == EXIT_SIGTERM
