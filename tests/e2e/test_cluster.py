"""An existing cluster: a head and a second node, started by hand on this machine, and a few steps across both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_support import ask, cluster_of_two, free_port
from run_support import TINY, run_rl

from trireme.errors import EXIT_BAD_INPUT, EXIT_OK
from trireme.supervision.status import read_status

CPUS_PER_NODE = 3  # five actors of one CPU each do not fit on one node


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """Address of a cluster of two nodes."""
    with cluster_of_two(CPUS_PER_NODE) as nodes:
        yield nodes.address


def test_a_run_spans_both_nodes_and_leaves_the_cluster(two_nodes: str, tmp_path: Path) -> None:
    sizes = ["--trainer.shards", "2", "--trainer.gpus-per-node", "2", "--inference.replicas", "2"]
    ended = run_rl(tmp_path, *TINY, "--cluster.address", two_nodes, *sizes)
    assert ended.code == EXIT_OK, ended.out
    status = read_status(ended.root)
    assert status is not None
    nodes = {part.name: part.node for part in status.parts}
    assert len(set(nodes.values())) == 2
    assert len({node for name, node in nodes.items() if name.startswith("trainer_")}) == 1
    assert len(ended.rows) == 3
    assert "rooms on 2 nodes" in ended.out
    assert ended.left == []  # of the driver's processes; those of the rooms are the cluster's
    assert ask(two_nodes, "ray.available_resources()['CPU']", 2.0 * CPUS_PER_NODE)


def test_an_address_without_a_cluster_is_refused(tmp_path: Path) -> None:
    ended = run_rl(tmp_path, *TINY, "--cluster.address", f"127.0.0.1:{free_port()}")
    assert ended.code == EXIT_BAD_INPUT, ended.out
    assert "ray start --head" in ended.out
