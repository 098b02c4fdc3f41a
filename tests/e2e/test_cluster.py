"""An existing cluster: a head and further nodes, started by hand on this machine, and a run across them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from cluster_support import Nodes, ask, cluster_of_two, free_port
from run_support import DEADLINE_S, ROOT, TINY, assert_bound_and_conservation, run_rl

from trireme.core.errors import EXIT_BAD_INPUT, EXIT_SIGTERM
from trireme.supervision.status import Status

CPUS_PER_NODE = 2  # four actors of one CPU each fill both nodes
SIZES = ["--trainer.shards", "2", "--trainer.gpus-per-node", "2", "--max-steps", "9999"]


def test_a_run_spans_two_nodes_and_a_replica_for_which_there_is_no_room_waits_for_a_third(tmp_path: Path) -> None:
    said: list[str] = []

    def steps() -> int:
        return len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())

    def trained_meanwhile() -> None:
        seen, deadline = steps(), time.monotonic() + DEADLINE_S
        while steps() < seen + 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        said.append(f"{steps() - seen} steps or more meanwhile")

    def scale(process: subprocess.Popen[str], nodes: Nodes) -> None:
        command = [sys.executable, "-m", "trireme.cli.trireme", "scale", str(tmp_path / "run"), "--replicas", "2"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asked:
            timer = threading.Timer(DEADLINE_S, asked.kill)
            timer.start()
            assert asked.stdout is not None
            for line in asked.stdout:
                said.append(line.strip())
                if "it waits for a place in the cluster" in line and len(nodes.started) == 2:
                    trained_meanwhile()
                    nodes.join()
            timer.cancel()
        process.send_signal(signal.SIGTERM)

    with cluster_of_two(CPUS_PER_NODE) as nodes:

        def on_line(line: str, process: subprocess.Popen[str]) -> None:
            if line.split()[:2] == ["step", "1/9999"]:
                threading.Thread(target=scale, args=(process, nodes)).start()

        ended = run_rl(tmp_path, *TINY, "--cluster.address", nodes.address, *SIZES, on_line=on_line)
        assert ended.code == EXIT_SIGTERM, (said, ended.out)
        assert ended.left == []  # of the driver's processes; those of the rooms are the cluster's
        assert ask(nodes.address, "ray.available_resources()['CPU']", 3.0 * CPUS_PER_NODE), "it left the cluster"

    assert "rooms on 2 nodes" in ended.out
    assert "1 replica; 1 more to start" in said, said
    assert any(line.endswith("steps or more meanwhile") and int(line.split()[0]) >= 2 for line in said), said
    assert said[-1] == "2 of 2 replicas serve"
    status = Status.read(ended.root)
    assert status is not None
    node_of = {part.name: part.node for part in status.parts}
    assert node_of["trainer_0"] == node_of["trainer_1"]
    assert len({node_of[name] for name in ("trainer_0", "inference_0", "inference_1")}) == 3
    replicas = [row["perf/replicas"] for row in ended.rows]
    assert replicas == sorted(replicas)
    assert set(replicas) == {1, 2}
    assert_bound_and_conservation(ended, bound=1)


def test_an_address_without_a_cluster_is_refused(tmp_path: Path) -> None:
    ended = run_rl(tmp_path, *TINY, "--cluster.address", f"127.0.0.1:{free_port()}")
    assert ended.code == EXIT_BAD_INPUT, ended.out
    assert "ray start --head" in ended.out
