"""A run over four nodes whose wires are cut: for some seconds, and for good.

Each node has one CPU, so the two shards, the orchestrator and the replica are on nodes of their own. No directory is
shared: the nodes but the head have empty disks in the place of the run's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from namespaces import Fabric, NamespaceNode, fabric, not_possible
from run_support import QUICKSTART, ROOT, TINY

from trireme.core.errors import EXIT_OK
from trireme.supervision.status import Status

# reason: a node is a set of namespaces, which need root and iproute2
without = pytest.mark.skipif(bool(not_possible()), reason=not_possible())
pytestmark = [pytest.mark.long, without]

NODES, SPARE = 4, 1
STEPS = 12
CUT_S = 5.0
DEADLINE_S = 420.0
SIZES = ("--trainer.shards", "1", "--trainer.replicate", "2", "--inference.replicas", "1")
DEADLINES = ("--timeouts.collective-s", "40", "--timeouts.heartbeat-s", "20", "--timeouts.place-s", "120")


@dataclass
class NodesRun:
    """A run whose driver is on the first node."""

    root: Path
    process: subprocess.Popen[bytes]
    log: Path
    nodes: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        file = self.root / "metrics.jsonl"
        found = []
        for line in file.read_text().splitlines(keepends=True) if file.exists() else []:
            with suppress(json.JSONDecodeError):  # it is being written
                found.append(json.loads(line))
        return found

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        ends = time.monotonic() + DEADLINE_S
        while not is_so():
            assert self.process.poll() is None, f"the run ended before {what}: {self.log.read_text()[-3000:]}"
            assert time.monotonic() < ends, f"waited for {what}: {self.log.read_text()[-3000:]}"
            time.sleep(0.1)

    def at_step(self, step: int) -> None:
        self.until(lambda: len(self.rows()) >= step, f"step {step}")

    def end(self) -> None:
        assert self.process.wait(DEADLINE_S) == EXIT_OK, self.log.read_text()[-3000:]

    def where(self, part: str, net: Fabric) -> NamespaceNode:
        """Returns the node of a part."""
        status = Status.read(self.root)
        assert status is not None
        (node,) = {each.node for each in status.parts if each.name == part}
        return net.nodes[[each.node for each in by_id(net)].index(node)]

    def incidents(self) -> list[dict[str, Any]]:
        file = self.root / "incidents.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@dataclass(frozen=True)
class Known:
    """A node of Ray, as STATUS names it."""

    node: str
    address: str


def by_id(net: Fabric) -> list[Known]:
    """Returns the cluster's nodes in the order of the fabric's."""
    ask = (
        "import ray, sys, json; ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False); "
        "print(json.dumps([[n['NodeID'], n['NodeManagerAddress']] for n in ray.nodes()]))"
    )
    said = net.nodes[0].run(sys.executable, "-c", ask, net.ray_address)
    assert said.returncode == 0, said.stderr
    found = {address: name for name, address in json.loads(said.stdout.splitlines()[-1])}
    return [Known(found.get(node.address, ""), node.address) for node in net.nodes]


@contextmanager
def cluster(directory: Path, spare: int = 0) -> Iterator[Fabric]:
    """Starts Ray on all nodes but `spare` of them, each with one CPU and a disk of its own."""
    outputs = directory / "outputs"
    outputs.mkdir()
    with fabric(NODES + spare, [directory]) as net:
        for node in net.nodes:
            if node.number:
                own = directory / f"disk_{node.number}"
                own.mkdir()
                done = node.run("mount", "--bind", str(own), str(outputs))
                assert done.returncode == 0, done.stderr
        for node in net.nodes[:NODES]:
            net.start_node(node, cpus=1)
        net.await_nodes(NODES)
        yield net


@contextmanager
def running(net: Fabric, directory: Path, *flags: str) -> Iterator[NodesRun]:
    """Starts a run, and ends it with the block."""
    place = ["--run.output-dir", str(directory / "outputs"), "--run.name", "run", "--cluster.address", net.ray_address]
    steps = ["--max-steps", str(STEPS), "--checkpoint.every", "2"]
    command = [sys.executable, "-m", "trireme.cli.rl", "@", str(QUICKSTART), *TINY, *place, *SIZES, *steps, *flags]
    log = directory / "output.txt"
    with log.open("wb") as output:
        asked = net.nodes[0].inside(*command)
        process = subprocess.Popen(asked, cwd=ROOT, env=dict(net.nodes[0].environ), stdout=output, stderr=output)
    try:
        yield NodesRun(directory / "outputs" / "run", process, log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(60)


def assert_each_step_once(run: NodesRun) -> None:
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    last = rows[-1]
    ends = ("trained", "in_training", "filtered", "requeued", "dropped", "failed", "active")
    assert last["ledger/dispatched"] == sum(last[f"ledger/{name}"] for name in ends)
    assert max(row["off_policy/max"] for row in rows) <= 1


@pytest.mark.parametrize("part", ["trainer_1", "inference_0", "orchestrator_0"])
def test_a_wire_that_is_cut_for_seconds_costs_these_seconds_alone(part: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as net, running(net, tmp_path, *DEADLINES) as run:
        run.at_step(3)
        node = run.where(part, net)
        if node.number == 0:  # the wire of the head, which all others use, is that of no part
            node = next(each for each in net.nodes if each.number)
        node.cut()
        time.sleep(CUT_S)
        node.mend()
        run.end()
        assert_each_step_once(run)
        assert run.incidents() == [], "nothing was started again"


def test_a_wire_that_is_cut_for_good_is_a_node_that_is_lost(tmp_path: Path) -> None:
    """The shard's successor waits for a node, which joins later, and the run goes back to its newest commit."""
    with cluster(tmp_path, SPARE) as net, running(net, tmp_path, *DEADLINES) as run:
        run.at_step(5)
        node = run.where("trainer_1", net)
        if node.number == 0:
            node = run.where("trainer_0", net)
        node.cut()
        joining = threading.Thread(target=net.start_node, args=(net.nodes[NODES],), kwargs={"cpus": 1})
        joining.start()
        run.end()
        joining.join(DEADLINE_S)
        assert_each_step_once(run)
        assert run.incidents(), "the loss is told"
