"""Shared by the benchmarks of wires: processes in network namespaces of their own, joined by wires of a given rate.

Each process has one interface, `eth0`, which sends and receives at that rate (`tc ... tbf`, in both directions), and
all are ports of one bridge, a switch without a limit. Bridge and wires are in a namespace that this process enters.
Nothing has a name outside, so all of it disappears with the processes, however they end; the kernel kills them with
this one.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
COMMANDS = ("ip", "tc", "nsenter", "setpriv", "unshare")
START_S = 120.0
BURST = "256kb"
"""What a wire lets pass at once: more than the largest packet that a kernel hands to an interface."""


class Node:
    """One process at the end of a wire. It takes orders, a JSON object in a line each, and answers with another."""

    def __init__(self, process: subprocess.Popen[bytes], number: int) -> None:
        self._process, self.number = process, number

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the answer to the last order. Raises RuntimeError when the process ends without one."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"node {self.number} ended with exit code {self._process.wait()}; its error is above")
        return json.loads(line)

    def in_own_namespace(self) -> bool:
        return os.readlink(f"/proc/{self.pid}/ns/net") != os.readlink("/proc/self/ns/net")


def address(number: int) -> str:
    """Returns the IP address of node `number`."""
    return f"10.0.0.{number + 1}"


def sent_bytes() -> int:
    """Counts the bytes that this process's `eth0` has sent, headers included. (/sys shows the interfaces of the
    namespace in which it was mounted, /proc those of the process.)"""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    values = next(line.split(":", 1)[1].split() for line in lines if line.strip().startswith("eth0:"))
    return int(values[8])


@contextmanager
def nodes(command: Sequence[str], count: int, rate_mbit: float) -> Iterator[list[Node]]:
    """Runs `command` as node 0 to `count` - 1 on wires of `rate_mbit`, and kills them at the end. Exits with a message
    where namespaces are not allowed. Once for each process, which stays in the bridge's namespace."""
    _enter_namespace()
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "br0", "type", "bridge")
    _run("ip", "link", "set", "br0", "up")
    with ExitStack() as stack:
        started = [Node(_start(command, stack), number) for number in range(count)]
        for node in started:
            _connect(node, rate_mbit)
        yield started


def _enter_namespace() -> None:
    missing = [command for command in COMMANDS if not shutil.which(command)]
    if missing:
        sys.exit(f"network namespaces are made with {', '.join(COMMANDS)}; here is no {', '.join(missing)}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        reason = os.strerror(ctypes.get_errno())
        sys.exit(f"this process may not make a network namespace ({reason}): run as root, or with CAP_SYS_ADMIN")


def _start(command: Sequence[str], stack: ExitStack) -> subprocess.Popen[bytes]:
    # A new session: Ctrl-C reaches this process alone, which then ends the others.
    isolated = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", *command]
    process = subprocess.Popen(isolated, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _connect(node: Node, rate_mbit: float) -> None:
    deadline = time.monotonic() + START_S
    while not node.in_own_namespace():
        if time.monotonic() > deadline:
            raise RuntimeError(f"node {node.number} has no namespace after {START_S:.0f} s")
        time.sleep(0.01)
    port = f"port{node.number}"
    _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
    _run("ip", "link", "set", port, "master", "br0", "up")
    inside = ["nsenter", "--target", str(node.pid), "--net"]
    _run(*inside, "ip", "link", "set", "lo", "up")
    _run(*inside, "ip", "address", "add", f"{address(node.number)}/24", "dev", "eth0")
    _run(*inside, "ip", "link", "set", "eth0", "up")
    shape = ["root", "tbf", "rate", f"{rate_mbit:g}mbit", "burst", BURST, "latency", "50ms"]
    _run(*inside, "tc", "qdisc", "add", "dev", "eth0", *shape)
    _run("tc", "qdisc", "add", "dev", port, *shape)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()}")
