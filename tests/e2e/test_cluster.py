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


def ask(address: str, expression: str, expected: object) -> bool:
    """Whether a driver of its own that connects to the cluster finds `expression` to be `expected` within 10 s."""
    code = (
        "import ray, sys, time\n"
        f"ray.init(address={address!r}, log_to_driver=False)\n"
        f"asked = lambda: {expression}\n"
        "end = time.monotonic() + 10\n"
        f"while asked() != {expected!r} and time.monotonic() < end:\n"
        "    time.sleep(0.2)\n"
        f"sys.exit(asked() != {expected!r})\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


NODES = "sum(node['Alive'] for node in ray.nodes())"


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """Address of a cluster of two nodes."""
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as ending:
        environ = ending.enter_context(pytest.MonkeyPatch.context())
        directory = ending.enter_context(tempfile.TemporaryDirectory(prefix="tr-", ignore_cleanup_errors=True))
        environ.setenv("TMPDIR", directory)
        port = address.partition(":")[2]
        ending.callback(stop, node("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={directory}"))
        assert any(ask(address, NODES, 1) for _ in range(5))  # it takes some seconds until the head answers
        ending.callback(stop, node(f"--address={address}"))
        assert any(ask(address, NODES, 2) for _ in range(5))
        yield address


def test_a_run_spans_both_nodes_and_leaves_the_cluster(two_nodes: str, tmp_path: Path) -> None:
    ended = run_rl(
        tmp_path, *TINY, "--cluster.address", two_nodes, "--trainer.shards", "2", "--inference.replicas", "2"
    )
    assert ended.code == EXIT_OK, ended.out
    assert len(ended.rows) == 3
    assert "rooms on 2 nodes" in ended.out
    assert ended.left == []  # of the driver's processes; those of the rooms are the cluster's
    assert ask(two_nodes, "ray.available_resources()['CPU']", 2.0 * CPUS_PER_NODE)


def test_an_address_without_a_cluster_is_refused(tmp_path: Path) -> None:
    ended = run_rl(tmp_path, *TINY, "--cluster.address", f"127.0.0.1:{free_port()}")
    assert ended.code == EXIT_BAD_INPUT, ended.out
    assert "ray start --head" in ended.out
