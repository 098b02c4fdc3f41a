"""`trireme doctor` on three namespaces as nodes: nothing on a healthy cluster, then faults that need real ones."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import namespaces
import pytest
from namespaces import Fabric, fabric
from run_support import QUICKSTART

from trireme.core.errors import EXIT_BAD_INPUT, EXIT_OK

# reason: what makes the nodes may be missing here, and says what; unit tests plant the faults in what nodes report
without = pytest.mark.skipif(bool(namespaces.not_possible()), reason=namespaces.not_possible())
pytestmark = [pytest.mark.long, without]

PORTS, FIRST, MASK = "20480-20991", 20480, 0xFE00
"""A range of ports that one mask of bits describes."""
SLOW_MBIT = 20


@dataclass
class Outcome:
    """The JSON that the command printed, and how it ended."""

    code: int
    values: dict[str, Any]

    def checks(self) -> set[tuple[str, str]]:
        return {(finding["node"], finding["check"]) for finding in self.values["findings"]}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def net(shared: Path) -> Iterator[Fabric]:
    """Three nodes with Ray and one shared directory. A test takes back what it plants."""
    with fabric(3, [shared]) as ray_fabric:
        ray_fabric.start_ray()
        yield ray_fabric


def doctor(net: Fabric, *flags: str, output_dir: Path) -> Outcome:
    place = ["--cluster.address", net.ray_address, "--run.output-dir", str(output_dir)]
    command = [sys.executable, "-m", "trireme.cli.trireme", "doctor", "@", str(QUICKSTART), *place]
    process = net.nodes[0].run(*command, "--cluster.ports", PORTS, "--json", *flags)
    assert process.stdout.startswith("{"), process
    return Outcome(process.returncode, json.loads(process.stdout))


def test_nothing_is_found_on_a_healthy_cluster(net: Fabric, shared: Path) -> None:
    outcome = doctor(net, "--nodes", "node0,node1,node2", output_dir=shared / "runs")
    assert (outcome.values["findings"], outcome.code) == ([], EXIT_OK)
    rates = outcome.values["bytes_per_s"]
    assert set(rates) == {node.address for node in net.nodes[1:]}, "from the head, where a trainer would be"
    assert all(rate > 0 for rate in rates.values())
    assert list(shared.iterdir()) == [], "it leaves nothing"


def test_planted_faults_are_found_with_their_nodes(net: Fabric, shared: Path) -> None:
    """A range of ports that the second node blocks for the first, a connection from the second to the third that works
    only the other way, a slow wire of the head, and a node that never joined."""
    head, second, third = net.nodes
    second.refuse(third)
    third.block(second, FIRST, MASK)
    head.limit(SLOW_MBIT)
    try:
        outcome = doctor(net, "--nodes", "node0,node1,node2,node3", output_dir=shared / "runs")
    finally:
        for node in net.nodes:
            node.unlimit()
    assert outcome.code == EXIT_BAD_INPUT
    assert outcome.checks() == {
        ("node3", "missing node"),
        (second.address, "one-way link"),
        (third.address, "port"),
        (head.address, "slow link"),
    }
