"""Nodes of a cluster on one machine, each in namespaces of its own: network, mount, PID, UTS and IPC.

A node has a private /tmp (in which this checkout stands at its place, read-only) and a private /dev/shm, so that a
shortcut through files of one machine fails as it does between machines. All nodes have `docker0` with the same address,
as machines with Docker do, and `eth0`, which is a port of one bridge in a namespace between them, the fabric.

    with fabric(3) as net:
        net.start_ray()                             # a raylet on each node, the head on the first
        net.nodes[0].run("ls", "/tmp")
        net.nodes[1].limit(20)                      # Mbit/s, both ways
        net.nodes[1].cut(); net.nodes[1].mend()
        net.nodes[1].refuse(net.nodes[2])           # a connection from 1 to 2 does not work, one from 2 to 1 does

Nothing has a name outside: all of it disappears with the processes that hold the namespaces, which the kernel kills
with this process, and with them each process of a node.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
from cluster_support import UNNEEDED
from run_support import ROOT

COMMANDS = ("ip", "tc", "nsenter", "setpriv", "unshare", "mount")
START_S, RUN_S = 180.0, 400.0
RAY_PORT = 6379
STORE_BYTES = 80 * 10**6
BURST = "256kb"
"""What a limited wire lets pass at once: more than the largest packet that a kernel hands to an interface."""
DOCKER = "172.17.0.1/16"
"""The address of every node's docker0."""
ALL = ("--net", "--mount", "--pid", "--uts", "--ipc")
HOLD = ["sleep", "infinity"]
ALIVE = """
import ray, sys, time
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
wanted, end = int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
while (alive := sum(node["Alive"] for node in ray.nodes())) != wanted and time.monotonic() < end:
    time.sleep(0.2)
sys.exit(f"{alive} nodes are there" if alive != wanted else 0)
"""
AGENT_READY = "/tmp/ray/session_latest/dashboard_agent_listen_port*"
"""The last of the files of its agents that a raylet waits for. It gives them 15 s, which no option changes (Ray 2.60,
`WaitForDashboardAgentPorts`), so nodes are started one after the other, without `UNNEEDED` processes."""
STARTS = 4
SETUP = """
set -e
mount -t tmpfs -o size=1g,mode=1777 tmpfs /mnt
{binds}
mount --move /mnt /tmp
mount -t tmpfs -o size={shm_mb}m,mode=1777 tmpfs /dev/shm
hostname {name}
mkdir -p /tmp/home /tmp/ray
{hosts}
mount --bind /tmp/hosts /etc/hosts
ip link set lo up
ip link add docker0 type bridge
ip address add {docker} dev docker0
ip link set docker0 up
"""


@functools.cache
def not_possible() -> str:
    """Says why this machine has no such nodes; "" if it has."""
    if os.geteuid():
        return "namespaces as nodes need root"
    if missing := [command for command in COMMANDS if not shutil.which(command)]:
        return f"namespaces as nodes are made with {', '.join(missing)}, which this machine lacks (package iproute2)"
    tried = ["unshare", *ALL, "--fork", "ip", "link", "add", "br0", "type", "bridge"]
    result = subprocess.run(tried, capture_output=True, text=True, timeout=START_S)
    return f"this machine allows no namespaces: {result.stderr.strip()}" if result.returncode else ""


@dataclass
class NamespaceNode:
    """One node. `pid`: of the process that is the first in its namespaces, as this process sees it."""

    number: int
    pid: int
    fabric_pid: int
    environ: Mapping[str, str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    output: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    @property
    def name(self) -> str:
        return f"node{self.number}"

    @property
    def address(self) -> str:
        return address(self.number)

    @property
    def port(self) -> str:
        """The bridge's end of its wire, in the fabric."""
        return f"port{self.number}"

    def inside(self, *command: str) -> list[str]:
        """The command line that runs a command in this node."""
        return [*_enter(self.pid, *ALL), "env", "-C", str(ROOT), *command]

    def run(self, *command: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command in this node, in the checkout's directory, and returns how it ended and what it printed."""
        env = {**self.environ, **(environ or {})}
        return subprocess.run(self.inside(*command), cwd=ROOT, env=env, capture_output=True, text=True, timeout=RUN_S)

    def start(self, *command: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts a process in this node, which ends with it. What it prints goes to `output`."""
        env = {**self.environ, **(environ or {})}
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            self.inside(*command), cwd=ROOT, env=env, stdin=null, stdout=self.output, stderr=self.output
        )
        self.started.append(process)
        return process

    def cut(self) -> None:
        """Takes the wire away: nothing arrives, nothing is refused either."""
        self._fabric("ip", "link", "set", self.port, "down")

    def mend(self) -> None:
        self._fabric("ip", "link", "set", self.port, "up")

    def limit(self, mbit: float) -> None:
        """Limits the wire, in both directions."""
        shape = ["root", "tbf", "rate", f"{mbit:g}mbit", "burst", BURST, "latency", "50ms"]
        self._fabric("tc", "qdisc", "replace", "dev", self.port, *shape)
        _do(*_enter(self.pid, "--net"), "tc", "qdisc", "replace", "dev", "eth0", *shape)

    def refuse(self, other: NamespaceNode, *options: str) -> None:
        """Drops what would open a connection from this node to another; connections from there work. `options`: what
        packets must match besides, as `tc` has it for u32."""
        opening = ["match", "ip", "protocol", "6", "0xff", "match", "u8", "0x02", "0x12", "at", "33"]
        to = ["match", "ip", "dst", f"{other.address}/32", *opening, *options]
        hole = ["action", "mirred", "egress", "redirect", "dev", "hole"]
        self._fabric("tc", "qdisc", "replace", "dev", self.port, "clsact")
        self._fabric("tc", "filter", "add", "dev", self.port, "ingress", "protocol", "ip", "u32", *to, *hole)

    def block(self, other: NamespaceNode, first: int, mask: int) -> None:
        """Blocks connections to those ports of another node whose bits in `mask` are those of `first`."""
        self.refuse(other, "match", "ip", "dport", str(first), hex(mask))

    def unlimit(self) -> None:
        """Takes back `limit`, `refuse` and `block`."""
        for direction in ("root", "clsact"):
            self._fabric("tc", "qdisc", "del", "dev", self.port, direction, may_fail=True)
        _do(*_enter(self.pid, "--net"), "tc", "qdisc", "del", "dev", "eth0", "root", may_fail=True)

    def _fabric(self, *command: str, may_fail: bool = False) -> None:
        _do(*_enter(self.fabric_pid, "--net"), *command, may_fail=may_fail)


@dataclass
class Fabric:
    """The nodes of a cluster, the head first."""

    nodes: list[NamespaceNode]

    @property
    def ray_address(self) -> str:
        return f"{self.nodes[0].address}:{RAY_PORT}"

    def start_ray(self, cpus: int = 2) -> None:
        """Starts Ray on all nodes. Returns when all of them are there."""
        for node in self.nodes:
            self.start_node(node, cpus)
        self.await_nodes(len(self.nodes))

    def start_node(self, node: NamespaceNode, cpus: int = 2) -> None:
        """Starts Ray on one node, again if it gives up because the machine is busy."""
        head = [f"--port={RAY_PORT}", "--head", "--include-dashboard=false", "--temp-dir=/tmp/ray"]
        role = head if node is self.nodes[0] else [f"--address={self.ray_address}"]
        options = [
            f"--node-ip-address={node.address}",
            f"--num-cpus={cpus}",
            f"--object-store-memory={STORE_BYTES}",
        ]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *UNNEEDED]
        for _ in range(STARTS):
            process = node.start(*ray, *role, *options)
            deadline = time.monotonic() + START_S
            while process.poll() is None and time.monotonic() < deadline:
                if node.run("bash", "-c", f"compgen -G '{AGENT_READY}'").returncode == 0:
                    return
                time.sleep(0.3)
            self.stop_node(node)
        node.output.seek(0)
        raise AssertionError(f"Ray did not start on {node.name} in {STARTS} tries: {node.output.read().decode()}")

    def stop_node(self, node: NamespaceNode) -> None:
        """Ends Ray on a node, and waits until all of it has ended."""
        for process in node.started:
            if process.poll() is None:
                for below in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):  # it has just ended
                        below.terminate()
            process.wait(START_S)
        node.started.clear()
        node.run(
            "rm", "-rf", "/tmp/ray/session_latest", *node.run("bash", "-c", "echo /tmp/ray/session_*").stdout.split()
        )

    def await_nodes(self, count: int) -> None:
        """Waits until the cluster has so many living nodes."""
        command = [sys.executable, "-c", ALIVE, self.ray_address, str(count), str(START_S)]
        for _ in range(5):  # it takes some seconds until the head answers
            output = self.nodes[0].run(*command)
            if output.returncode == 0:
                return
        raise AssertionError(f"the cluster has not {count} nodes: {output}")


def address(number: int) -> str:
    return f"10.77.0.{number + 1}"


@contextmanager
def fabric(
    count: int,
    shared: Sequence[Path] = (),
    shm_mb: int = 256,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Fabric]:
    """Makes nodes, with the directories `shared` at their places in all of them, and ends them however the block
    ends. /dev/shm has `shm_mb` megabytes on each. Their processes have `environ` besides `_environ`."""
    assert not not_possible()
    with ExitStack() as ending:
        middle = _hold(ending, "--net")
        for command in ("link set lo up", "link add br0 type bridge", "link set br0 up"):
            _do(*_enter(middle, "--net"), "ip", *command.split())
        for command in ("link add hole type veth peer name bottom", "link set hole up", "link set bottom up"):
            _do(*_enter(middle, "--net"), "ip", *command.split())
        binds = _binds([(ROOT, "ro"), (Path(sys.prefix), "ro"), *((place, "rw") for place in shared)])
        hosts = "".join(f"echo {address(n)} node{n} >> /tmp/hosts\n" for n in range(count))
        nodes = []
        for number in range(count):
            pid = _hold(ending, *ALL, "--mount-proc", "--fork", "--kill-child")
            values = {"shm_mb": shm_mb, "binds": binds, "docker": DOCKER}
            hosts_file = f"echo 127.0.0.1 localhost > /tmp/hosts\n{hosts}"
            script = SETUP.format(**values, name=f"node{number}", hosts=hosts_file)
            _do(*_enter(pid, *ALL), "bash", "-c", script)
            nodes.append(NamespaceNode(number, pid, middle, {**_environ(), **(environ or {})}))
            _connect(nodes[-1])
        yield Fabric(nodes)


def _environ() -> dict[str, str]:
    """Variables of a node: those of this process that matter, and a home of its own."""
    inherited = {name: os.environ[name] for name in ("PATH", "LANG", "VIRTUAL_ENV") if name in os.environ}
    fixed = {"HOME": "/tmp/home", "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return {**inherited, **fixed, "RAY_AUTH_MODE": "disabled"}


def _binds(places: Sequence[tuple[Path, str]]) -> str:
    """Shell commands that keep places below /tmp in a node's own /tmp, which is at /mnt first; the others are there."""
    lines = []
    for place, mode in places:
        if place.is_relative_to("/tmp"):
            inside = Path("/mnt") / place.relative_to("/tmp")
            lines += [f"mkdir -p {inside}", f"mount --bind {place} {inside}"]
            lines += [f"mount -o remount,bind,ro {inside}"] if mode == "ro" else []
    return "\n".join(lines)


def _hold(ending: ExitStack, *namespaces: str) -> int:
    """Starts a process that holds new namespaces, and returns its id once they are there."""
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, *HOLD]
    process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)
    ending.callback(_end, process)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        holder = _holder(process.pid)
        if holder is not None:
            return holder
        time.sleep(0.01)
    raise AssertionError(f"`{' '.join(command)}` has no namespaces after {START_S:g} s")


def _holder(pid: int) -> int | None:
    """The process below `pid`, or that itself, that sleeps: all before it have done their work."""
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        if process.name() == HOLD[0]:
            return int(process.pid)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what holds namespaces, and so the first process in them, with which the kernel kills all others."""
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(START_S)
    psutil.wait_procs(below, timeout=START_S)


def _connect(node: NamespaceNode) -> None:
    fabric_side = _enter(node.fabric_pid, "--net")
    _do(*fabric_side, "ip", "link", "add", node.port, "type", "veth", "peer", "name", f"wire{node.number}")
    _do(*fabric_side, "ip", "link", "set", node.port, "master", "br0", "up")
    _do(*fabric_side, "ip", "link", "set", f"wire{node.number}", "netns", str(node.pid), "name", "eth0")
    inside = _enter(node.pid, "--net")
    _do(*inside, "ip", "address", "add", f"{node.address}/24", "dev", "eth0")
    _do(*inside, "ip", "link", "set", "eth0", "up")


def _enter(pid: int, *namespaces: str) -> list[str]:
    return ["nsenter", "--target", str(pid), *namespaces]


def _do(*command: str, may_fail: bool = False) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    if result.returncode and not may_fail:
        raise AssertionError(f"{' '.join(command)} failed: {result.stderr.strip()}")
