"""One run on two nodes and then on three: shards on different nodes, replicas of two ranks,
each of which is within a node, and both transports between nodes."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from namespaces import Fabric, fabric, not_possible
from nodes_support import NodesRun, assert_steps_once, running
from resume_support import rows_of
from run_support import TINY, taken

from trireme.checkpoint.manifest import Manifest

# reason: a node is a set of namespaces, which need root and iproute2
without = pytest.mark.skipif(bool(not_possible()), reason=not_possible())
pytestmark = [pytest.mark.long, without]

STEPS, BOUND = 4, 1
"""Of the run on two nodes; on three it makes as many more."""
NODES = 3
CPUS = {2: 5, NODES: 3}
"""CPUs of each node, by the number of nodes. A replica takes two, shards and the orchestrator one each. Ray places
replicas first, and fills a node before the next: so there are two and a shard on the first of two nodes."""
REPLICAS = {2: 3, NODES: 2}
SHM_MB = 1500
SIZES = ("--trainer.shards", "2", "--inference.tensor-parallel", "2")
FLAGS = (*TINY, *SIZES, "--inference.memory-gb", "0.05", "--checkpoint.every", "2", "--resume", "auto")


def nodes_of_replicas(places: Mapping[str, str]) -> set[str]:
    return {address for part, address in places.items() if part.startswith("inference_")}


def versions(run: NodesRun, replica: int, attempt: int, how: str) -> set[int]:
    return taken(run.root / "logs" / f"attempt_{attempt}", replica, how)


def followed(net: Fabric, directory: Path, steps: int, *flags: str) -> tuple[NodesRun, dict[str, str]]:
    """Runs to this step. Returns the run, and the node of each part while it trained."""
    sizes = ("--inference.replicas", str(REPLICAS[len(net.nodes)]))
    with running(net, directory, *FLAGS, *sizes, "--max-steps", str(steps), *flags) as run:
        begun = len(run.rows())
        run.at_step(begun + 1)
        places = run.places(net)
        run.end()
    return run, places


def assert_whole(run: NodesRun, steps: int, attempt: int, nodes: int) -> None:
    rows = run.rows()
    assert_steps_once(rows, steps, BOUND)
    assert [row["attempt"] for row in rows[-STEPS:]] == [attempt] * STEPS
    assert len({row["weights/digest"] for row in rows}) == steps, "each step has changed the weights"
    assert len(rows_of(run.root / "trained.jsonl")) == steps
    assert f"rooms on {nodes} nodes ready" in run.out
    newest = Manifest.verified(run.root / "checkpoints" / f"step_{steps:06d}")
    assert (newest.step, newest.shards) == (steps, 2)
    assert run.incidents() == []


def test_on_two_nodes_by_broadcasts_and_on_three_by_the_object_store(tmp_path: Path) -> None:
    with fabric(NODES, [tmp_path], shm_mb=SHM_MB) as net:
        two = Fabric(net.nodes[:2])
        two.start_ray(cpus=CPUS[2])
        run, places = followed(two, tmp_path, STEPS, "--inference.transport", "broadcast")
        assert places["trainer_0"] != places["trainer_1"], places
        assert nodes_of_replicas(places) == {node.address for node in two.nodes}, places
        assert_whole(run, STEPS, attempt=1, nodes=2)
        for replica in range(REPLICAS[2]):
            assert versions(run, replica, 1, "as it was broadcast") & {2, 3, 4}, "over the wire to the other node"

        for node in two.nodes:
            net.stop_node(node)
        net.start_ray(cpus=CPUS[NODES])
        run, places = followed(net, tmp_path, 2 * STEPS, "--inference.transport", "object_store")
        assert places["trainer_0"] != places["trainer_1"], places
        assert len(nodes_of_replicas(places)) == REPLICAS[NODES], places
        assert f"resumed from {run.root}/checkpoints/step_{STEPS:06d}" in run.out
        assert_whole(run, 2 * STEPS, attempt=2, nodes=3)
        for replica in range(REPLICAS[NODES]):
            assert not versions(run, replica, 2, "as it was broadcast")
