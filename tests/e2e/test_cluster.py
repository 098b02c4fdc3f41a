"""An existing cluster: a head and a second node, started by hand on this machine, and a few steps across both."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_support import Nodes, ask, cluster_of_two, free_port
from run_support import DEADLINE_S, ROOT, TINY, assert_bound_and_conservation, run_rl

from trireme.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_SIGTERM
from trireme.supervision.status import read_status

CPUS_PER_NODE = 3  # five actors of one CPU each do not fit on one node


SIZES = ["--trainer.shards", "2", "--trainer.gpus-per-node", "2", "--inference.replicas", "2"]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Nodes]:
    with cluster_of_two(CPUS_PER_NODE) as nodes:
        yield nodes


def test_a_run_spans_both_nodes_and_leaves_the_cluster(two_nodes: Nodes, tmp_path: Path) -> None:
    ended = run_rl(tmp_path, *TINY, "--cluster.address", two_nodes.address, *SIZES)
    assert ended.code == EXIT_OK, ended.out
    status = read_status(ended.root)
    assert status is not None
    nodes = {part.name: part.node for part in status.parts}
    assert len(set(nodes.values())) == 2
    assert len({node for name, node in nodes.items() if name.startswith("trainer_")}) == 1
    assert len(ended.rows) == 3
    assert "rooms on 2 nodes" in ended.out
    assert ended.left == []  # of the driver's processes; those of the rooms are the cluster's
    assert ask(two_nodes.address, "ray.available_resources()['CPU']", 2.0 * CPUS_PER_NODE)


def test_replicas_for_which_there_is_no_room_wait_until_the_cluster_grows(two_nodes: Nodes, tmp_path: Path) -> None:
    """The run leaves one CPU: one of two replicas more starts, and the run goes on while the other waits for a node."""
    said: list[str] = []

    def scale(process: subprocess.Popen[str]) -> None:
        command = [sys.executable, "-m", "trireme.tools.main", "scale", str(tmp_path / "run"), "--replicas", "4"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asked:
            timer = threading.Timer(DEADLINE_S, asked.kill)
            timer.start()
            assert asked.stdout is not None
            for line in asked.stdout:
                said.append(line.strip())
                if said[-1].startswith("3 of 4 replicas serve"):
                    two_nodes.join()
            timer.cancel()
        process.send_signal(signal.SIGTERM)

    def on_line(line: str, process: subprocess.Popen[str]) -> None:
        if line.split()[:2] == ["step", "1/9999"]:
            threading.Thread(target=scale, args=(process,)).start()

    flags = [*TINY, "--cluster.address", two_nodes.address, *SIZES, "--max-steps", "9999"]
    ended = run_rl(tmp_path, *flags, on_line=on_line)
    assert ended.code == EXIT_SIGTERM, (said, ended.out)
    assert "2 replicas; 2 more to start" in said, said
    assert any("it waits for a place in the cluster" in line for line in said), said
    assert said[-1] == "4 of 4 replicas serve"
    assert [row["perf/replicas"] for row in ended.rows] == sorted(row["perf/replicas"] for row in ended.rows)
    assert {2, 3, 4} <= {row["perf/replicas"] for row in ended.rows}, "it went on meanwhile"
    assert_bound_and_conservation(ended, bound=1)


def test_an_address_without_a_cluster_is_refused(tmp_path: Path) -> None:
    ended = run_rl(tmp_path, *TINY, "--cluster.address", f"127.0.0.1:{free_port()}")
    assert ended.code == EXIT_BAD_INPUT, ended.out
    assert "ray start --head" in ended.out
