"""A Ray cluster of several nodes, all of them on this machine, started by hand as a user would."""

import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

import psutil
from run_support import KILLED_GONE_S, wait_until_disconnected

NODES = "sum(node['Alive'] for node in ray.nodes())"
STOP_S = 60
UNNEEDED = ("--no-monitor", "--include-log-monitor=false")
"""Flags of `ray start` that leave out processes of a node (the autoscaler's, and one for drivers that want logs). Their
imports would take the time in which the node's raylet waits for its agents."""
DECLARED_GPUS = 4
"""GPUs that the cluster shared by many tests says it has. Nothing computes on them."""


def free_port() -> int:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def listens(port: int) -> bool:
    with closing(socket.socket()) as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def ask(address: str, expression: str, expected: object) -> bool:
    """True if a separate driver that connects to the cluster finds `expression` to be `expected` within 60 s."""
    code = (
        "import ray, sys, time\n"
        f"ray.init(address={address!r}, log_to_driver=False)\n"
        f"asked = lambda: {expression}\n"
        "end = time.monotonic() + 60\n"
        f"while asked() != {expected!r} and time.monotonic() < end:\n"
        "    time.sleep(0.2)\n"
        f"sys.exit(asked() != {expected!r})\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300).returncode == 0


@dataclass(frozen=True)
class Nodes:
    """A running cluster: its address, and the processes that its nodes were started with, the head first."""

    address: str
    cpus: int
    environ: Mapping[str, str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def add(self, *flags: str) -> None:
        """Starts one node more, with `cpus` logical CPUs."""
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command = [*start, f"--num-cpus={self.cpus}", *UNNEEDED, *flags]
        process = subprocess.Popen(
            command, env={**os.environ, **self.environ}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.started.append(process)

    def join(self) -> None:
        self.add(f"--address={self.address}")

    def raylet(self, node: int) -> int:
        """Process id of the raylet of a node, by its place in `started`."""
        below = psutil.Process(self.started[node].pid).children(recursive=True)
        return next(process.pid for process in below if process.name() == "raylet")

    def stop(self) -> None:
        for process in reversed(self.started):
            process.terminate()
            process.wait(STOP_S)


def assert_gone(mark: str) -> None:
    """Nothing outlives its cluster: no actor, no engine."""
    remaining = wait_until_disconnected(mark, KILLED_GONE_S)
    assert remaining == [], f"processes were left: {remaining}"


@contextmanager
def cluster_of_two(cpus: int, environ: Mapping[str, str] | None = None) -> Iterator[Nodes]:
    """A head and a second node, to which others can be added. Their processes, and those of the actors on them, have
    `environ` besides this one's."""
    port = free_port()
    with ExitStack() as ending:
        directory = ending.enter_context(tempfile.TemporaryDirectory(prefix="tr-", ignore_cleanup_errors=True))
        mark = f"TRIREME_TEST_MARK={uuid.uuid4().hex}"  # inherited by actors, whichever run they are of
        nodes = Nodes(f"127.0.0.1:{port}", cpus, {"TMPDIR": directory, **dict([mark.split("=")]), **(environ or {})})
        ending.callback(assert_gone, mark)
        ending.callback(nodes.stop)
        nodes.add("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={directory}")
        assert any(ask(nodes.address, NODES, 1) for _ in range(5))  # it takes some seconds until the head answers
        nodes.join()
        assert any(ask(nodes.address, NODES, 2) for _ in range(5))
        yield nodes
