"""A machine that reaches the nodes of a run, and is none of them, tries each port at which anything listens."""

import json
import re
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import namespaces
import pytest
from namespaces import Fabric, NamespaceNode, fabric
from outside_support import PLANTED
from run_support import DEADLINE_S, QUICKSTART, ROOT, TINY

# reason: what makes the nodes may be missing here, and says what; unit tests cannot show what Ray's ports answer
without = pytest.mark.skipif(bool(namespaces.not_possible()), reason=namespaces.not_possible())
pytestmark = [pytest.mark.long, without]

PUBLIC = {"/api/healthz", "/api/local_raylet_healthz"}
"""Paths of Ray's agent that anyone may ask: whether the node lives."""
SUPPORT = ROOT / "tests" / "e2e" / "outside_support.py"
LISTENER = re.compile(r"(tcp|udp)\s+\S+\s+\d+\s+\d+\s+(\S+):(\d+)\s+\S+\s*(?:users:\(\(\"([^\"]+)\")?")


def listeners(node: NamespaceNode) -> list[tuple[str, str, int, str]]:
    """Returns protocol, address, port and process of all that listens on a node."""
    sockets = node.run("ss", "--listening", "--numeric", "--tcp", "--udp", "--processes", "--no-header").stdout
    matches = [LISTENER.match(line) for line in sockets.splitlines()]
    assert all(matches), sockets
    return [(match[1], match[2], int(match[3]), match[4] or "") for match in matches if match]


def steps(run: Path) -> int:
    rows = run / "metrics.jsonl"
    return len(rows.read_text().splitlines()) if rows.exists() else 0


def await_steps(run: Path, count: int, net: Fabric) -> None:
    deadline = time.monotonic() + 2 * DEADLINE_S
    while steps(run) < count:
        alive = net.nodes[0].started[-1].poll() is None
        if not alive or time.monotonic() > deadline:
            net.nodes[0].output.seek(0)
            raise AssertionError(f"{steps(run)} of {count} steps: {net.nodes[0].output.read().decode()}")
        time.sleep(0.5)


def kind(answer: Mapping[str, Any], process: str) -> str:
    """Returns what a port is, by what it told a stranger. Fails if that is more than what docs/clusters.md says."""
    if codes := set(answer["grpc"].values()):
        assert codes == {"UNAUTHENTICATED", "UNIMPLEMENTED"}, (process, answer)
        return "calls"
    if answer["store"]:
        assert process == "ray::ShardActor", (process, answer)
        return "store"
    if not answer["http"]:
        assert answer["spoke_first"] == "", (process, answer)
        return "silent"
    if set(answer["http"].values()) == {"HTTP/1.0 200 OK"}:  # the same page for each path
        assert process in ("ray::DashboardA", "python"), (process, answer)
        return "metrics"
    open_paths = {path for path, status in answer["http"].items() if " 401 " not in status}
    assert open_paths <= PUBLIC, (process, answer)
    return "agent"


def kinds_of_ports(node: NamespaceNode, stranger: NamespaceNode) -> set[str]:
    """Returns what kinds of ports a stranger finds on a node."""
    sockets = listeners(node)
    assert {protocol for protocol, *_ in sockets} == {"tcp"}
    processes = {str(port): process for _, at, port, process in sockets if "127.0.0.1" not in at}
    command = [sys.executable, str(SUPPORT), node.address, *processes]
    output = stranger.run(*command, environ={"RAY_AUTH_TOKEN": ""})
    assert output.returncode == 0, output.stderr
    answers = json.loads(output.stdout)
    closed = [port for port in processes if not answers[port]["reached"]]
    assert len(closed) <= len(processes) // 4, f"{closed} are closed: gloo closes those of a broadcast that has ended"
    return {kind(answers[port], process) for port, process in processes.items() if port not in closed}


def unpickled(node: NamespaceNode) -> list[str]:
    return node.run("bash", "-c", f"compgen -G '{PLANTED}*'").stdout.split()


def test_nothing_obeys_without_the_token_and_nothing_unpickles(tmp_path: Path) -> None:
    """Two shards, the orchestrator and a replica on two nodes, and the services of Ray; the third has only a wire."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with fabric(3, [tmp_path], environ=token) as net:
        *nodes, stranger = net.nodes
        loads = f"import pickle, sys; sys.path.append({str(SUPPORT.parent)!r}); import outside_support as o"
        assert stranger.run(sys.executable, "-c", f"{loads}; pickle.loads(next(o.framings(1)))").returncode == 0
        assert unpickled(stranger) == [f"{PLANTED}-1-2"], "what is sent works"
        for node in nodes:
            net.start_node(node)
        net.await_nodes(len(nodes))
        place = ["--run.output-dir", str(tmp_path), "--run.name", "r", "--cluster.address", net.ray_address]
        sizes = ["--trainer.shards", "2", "--max-steps", "9999"]
        nodes[0].start(sys.executable, "-m", "trireme.cli.rl", "@", str(QUICKSTART), *TINY, *place, *sizes)
        await_steps(tmp_path / "r", 1, net)
        kinds = [kinds_of_ports(node, stranger) for node in nodes]
        assert set().union(*kinds) == {"calls", "store", "silent", "metrics", "agent"}
        await_steps(tmp_path / "r", steps(tmp_path / "r") + 2, net)  # what was sent did no harm
        assert [unpickled(node) for node in nodes] == [[], []]
