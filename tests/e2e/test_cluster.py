"""An existing cluster: a head and a second node, started by hand on this machine, and a few steps across both."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import ray
from run_support import TINY, run_rl

from trireme.errors import EXIT_BAD_INPUT, EXIT_OK

CPUS_PER_NODE = 3  # five actors of one CPU each do not fit on one node


def free_port() -> int:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def node(*flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={CPUS_PER_NODE}", *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(60)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """Address of a cluster of two nodes."""
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as ending:
        directory = ending.enter_context(tempfile.TemporaryDirectory(prefix="tr-", ignore_cleanup_errors=True))
        port = address.partition(":")[2]
        head = node("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={directory}")
        ending.callback(stop, head)
        connect(address, nodes=1)
        ending.callback(stop, node(f"--address={address}"))
        connect(address, nodes=2)
        yield address


def connect(address: str, nodes: int, timeout_s: float = 60) -> None:
    """Waits until the cluster at `address` has `nodes` living nodes."""
    code = (
        "import ray, sys, time\n"
        f"end = time.time() + {timeout_s}\n"
        "while time.time() < end:\n"
        "    try:\n"
        f"        ray.init(address='{address}', log_to_driver=False)\n"
        f"        sys.exit(0 if sum(n['Alive'] for n in ray.nodes()) >= {nodes} else 1)\n"
        "    except ConnectionError:\n"
        "        time.sleep(0.5)\n"
        "sys.exit(1)\n"
    )
    for _ in range(10):
        if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0:
            return
    raise TimeoutError(f"no cluster of {nodes} nodes at {address}")


def test_a_run_spans_both_nodes_and_leaves_the_cluster(two_nodes: str, tmp_path: Path) -> None:
    ended = run_rl(
        tmp_path, *TINY, "--cluster.address", two_nodes, "--trainer.shards", "2", "--inference.replicas", "2"
    )
    assert ended.code == EXIT_OK, ended.out
    assert len(ended.rows) == 3
    assert "rooms on 2 nodes" in ended.out
    assert ended.left == []  # of the driver; the rooms' processes belong to the cluster
    ray.init(address=two_nodes, log_to_driver=False)
    try:
        assert ray.available_resources()["CPU"] == 2 * CPUS_PER_NODE
    finally:
        ray.shutdown()


def test_an_address_without_a_cluster_is_refused(tmp_path: Path) -> None:
    ended = run_rl(tmp_path, *TINY, "--cluster.address", f"127.0.0.1:{free_port()}")
    assert ended.code == EXIT_BAD_INPUT, ended.out
    assert "ray start --head" in ended.out
