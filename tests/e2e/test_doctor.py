"""`trireme doctor` on three namespaces as nodes: nothing on a healthy cluster, then faults that need real ones."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import namespaces
import pytest
from namespaces import Fabric, NamespaceNode, fabric
from run_support import QUICKSTART, ROOT

from trireme.core.errors import EXIT_BAD_INPUT, EXIT_OK

# reason: what makes the nodes may be missing here, and says what; unit tests plant the faults in what nodes report
without = pytest.mark.skipif(bool(namespaces.not_possible()), reason=namespaces.not_possible())
pytestmark = [pytest.mark.long, without]

PORTS, FIRST, MASK = "20480-20991", 20480, 0xFE00
"""A range of ports that one mask of bits describes."""
OTHER = "safetensors"
"""A package of which the third node has another version: a copy of this one's, which comes first in its path."""
OTHER_VERSION = "0.0.1"
AHEAD = "import time\nreal = time.time\ntime.time = lambda: real() + 60\n"
"""Makes the clock of Python's processes a minute ahead. (Under libfaketime 0.9.10 Python's waits fail or never end.)"""
OPEN_FILES = 1000
SLOW_MBIT = 20


@dataclass
class Told:
    """What the command printed as JSON, and how it ended."""

    code: int
    values: dict[str, Any]
    error: str

    def checks(self) -> set[tuple[str, str]]:
        return {(finding["node"], finding["check"]) for finding in self.values["findings"]}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def net(shared: Path) -> Iterator[Fabric]:
    """Three nodes with Ray and one shared directory. A test takes back what it plants."""
    with fabric(3, [shared]) as made:
        made.start_ray()
        yield made


def doctor(net: Fabric, *flags: str, output_dir: Path, model: Path = ROOT / "assets" / "sort-base") -> Told:
    place = ["--cluster.address", net.ray_address, "--run.output-dir", str(output_dir), "--model.name", str(model)]
    command = [sys.executable, "-m", "trireme.cli.trireme", "doctor", "@", str(QUICKSTART), *place]
    done = net.nodes[0].run(*command, "--cluster.ports", PORTS, "--json", *flags)
    assert done.stdout.startswith("{"), done
    return Told(done.returncode, json.loads(done.stdout), done.stderr)


def test_nothing_is_found_on_a_healthy_cluster(net: Fabric, shared: Path) -> None:
    told = doctor(net, "--nodes", "node0,node1,node2", output_dir=shared / "runs")
    assert (told.values["findings"], told.code) == ([], EXIT_OK)
    assert len(told.values["links"]) == 6 * 3, "six pairs, three ports"
    assert len(told.values["bytes_per_s"]) == 6
    assert all(rate > 0 for rate in told.values["bytes_per_s"].values())
    assert list(shared.iterdir()) == [], "it leaves nothing"


def test_planted_faults_are_found_with_their_nodes(net: Fabric, shared: Path) -> None:
    """A range of ports that the second node blocks for the first, a connection from the second to the third that works
    only the other way, a slow wire of the head, and a node that never joined."""
    head, second, third = net.nodes
    second.refuse(third)
    third.block(second, FIRST, MASK)
    head.limit(SLOW_MBIT)
    try:
        told = doctor(net, "--nodes", "node0,node1,node2,node3", output_dir=shared / "runs")
    finally:
        for node in net.nodes:
            node.unlimit()
    assert told.code == EXIT_BAD_INPUT
    assert told.checks() == {
        ("node3", "missing node"),
        (second.address, "one-way link"),
        (third.address, "port"),
        (head.address, "slow link"),
        (second.address, "slow link"),
        (third.address, "slow link"),
    }


def test_a_model_that_a_node_lacks_and_cannot_be_sent_is_found(net: Fabric, shared: Path) -> None:
    """The head has it without its weights. The second node has nothing in its place, the third another model."""
    head, second, third = net.nodes
    model = Path("/tmp/half")
    for node in (head, third):
        assert node.run("cp", "-r", str(ROOT / "assets" / "sort-base"), str(model)).returncode == 0
    assert head.run("bash", "-c", f"rm {model}/*.safetensors").returncode == 0
    told = doctor(net, output_dir=shared / "runs", model=model)
    assert told.code == EXIT_BAD_INPUT
    assert told.checks() == {(second.address, "model"), (third.address, "model")}
    found = {each["node"]: each["found"] for each in told.values["findings"]}
    assert found[second.address] == f"it has no model {model}"
    assert "model.safetensors" in found[third.address]


def plant(net: Fabric, node: NamespaceNode) -> None:
    """Starts the Ray of a node again: with few open files, a clock that is a minute ahead and another version of a
    package, which take another PYTHONPATH, gloo told to use docker0, and a small /dev/shm."""
    net.stop_node(node)
    net.await_nodes(2)
    code, metadata = find_spec(OTHER), distribution(OTHER).read_text("METADATA")
    assert code is not None
    assert code.submodule_search_locations
    assert metadata
    told = metadata.replace(f"Version: {version(OTHER)}", f"Version: {OTHER_VERSION}", 1)
    other = f"/tmp/ahead/{OTHER}-{OTHER_VERSION}.dist-info"
    for command in (
        f"mkdir -p {other}; cp -r {code.submodule_search_locations[0]} /tmp/ahead",
        f"echo {shlex.quote(told)} > {other}/METADATA; echo {shlex.quote(AHEAD)} > /tmp/ahead/sitecustomize.py",
    ):
        done = node.run("bash", "-c", command)
        assert done.returncode == 0, done.stderr
    environ = {"GLOO_SOCKET_IFNAME": "docker0", "PYTHONPATH": f"/tmp/ahead:{node.environ['PYTHONPATH']}"}
    assert node.run("mount", "-o", "remount,size=100m", "/dev/shm").returncode == 0
    net.start_node(node, environ=environ, before=["prlimit", f"--nofile={OPEN_FILES}:{OPEN_FILES}"])
    net.await_nodes(3)


def test_faults_of_a_node_itself_are_found(net: Fabric) -> None:
    """The third node has another limit, clock, package, path, interface and memory. No node shares the directory of
    runs, which is on a full disk there, and only the head has the model, which is sent. The others do not reach what
    listens at its docker0."""
    head, _, third = net.nodes
    runs, model = Path("/tmp/runs"), Path("/tmp/model")
    assert head.run("cp", "-r", str(ROOT / "assets" / "sort-base"), str(model)).returncode == 0
    assert third.run("mkdir", str(runs)).returncode == 0
    assert third.run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(runs)).returncode == 0
    plant(net, third)
    told = doctor(net, output_dir=runs, model=model)
    assert told.code == EXIT_BAD_INPUT
    mine = {check for node, check in told.checks() if node == third.address}
    assert mine == {"open files", "package", "shm", "disk", "unshared directory", "interface", "clock", "variable"}
    packages = [each["found"] for each in told.values["findings"] if each["check"] == "package"]
    assert packages == [f"{OTHER} is {OTHER_VERSION}"]
    assert told.checks() - {(third.address, check) for check in mine} == {
        (net.nodes[1].address, "unshared directory"),
        (head.address, "port"),
        (net.nodes[1].address, "port"),
    }
    assert sorted(told.values["model_sent_to"]) == [net.nodes[1].address, third.address]


def test_what_a_run_says_before_it_starts(net: Fabric) -> None:
    """The same checks refuse a run whose six actors take all nodes, after `test_faults_of_a_node_itself_are_found`."""
    flags = ["--cluster.address", net.ray_address, "--run.output-dir", "/tmp/runs", "--trainer.shards", "4"]
    done = net.nodes[0].run(sys.executable, "-m", "trireme.cli.rl", "@", str(QUICKSTART), *flags, timeout_s=300.0)
    assert done.returncode == EXIT_BAD_INPUT, done
    assert f"node {net.nodes[2].address}: a process may open {OPEN_FILES:,} files" in done.stderr
    assert "GLOO_SOCKET_IFNAME = docker0" in done.stdout
