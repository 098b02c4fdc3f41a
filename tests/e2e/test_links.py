"""A run over four nodes whose wires are cut, for some seconds and for good, and of which one is killed.

Each node has one CPU, so the two shards, the orchestrator and the replica are on nodes of their own.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from namespaces import Fabric, fabric, not_possible
from nodes_support import DEADLINE_S, assert_steps_once, lose, running
from run_support import TINY

# reason: a node is a set of namespaces, which need root and iproute2
without = pytest.mark.skipif(bool(not_possible()), reason=not_possible())
pytestmark = [pytest.mark.long, without]

NODES, SPARE = 4, 1
STEPS = 12
LONG = 60
CUT_S = 5.0
SIZES = ("--trainer.shards", "1", "--trainer.replicate", "2", "--inference.replicas", "1")
DEADLINES = ("--timeouts.collective-s", "40", "--timeouts.heartbeat-s", "20", "--timeouts.place-s", "120")
FLAGS = (*TINY, *SIZES, *DEADLINES, "--max-steps", str(STEPS), "--checkpoint.every", "2")


@contextmanager
def cluster(directory: Path, spare: int = 0) -> Iterator[Fabric]:
    """Starts Ray on all nodes but `spare` of them, each with one CPU."""
    with fabric(NODES + spare, [directory]) as net:
        for node in net.nodes[:NODES]:
            net.start_node(node, cpus=1)
        net.await_nodes(NODES)
        yield net


@pytest.mark.parametrize("part", ["trainer_1", "inference_0", "orchestrator_0"])
def test_a_wire_that_is_cut_for_seconds_costs_these_seconds_alone(part: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as net, running(net, tmp_path, *FLAGS) as run:
        run.at_step(3)
        node = run.node_of(part, net)
        if node.number == 0:  # the wire of the head, which all others use, is that of no part
            node = next(candidate for candidate in net.nodes if candidate.number)
        node.cut()
        time.sleep(CUT_S)
        node.mend()
        run.end()
        assert_steps_once(run.rows(), STEPS, bound=1)
        assert run.incidents() == [], "nothing was started again"


@pytest.mark.parametrize("how", ["cut", "killed"])
def test_a_node_whose_wire_is_cut_for_good_or_that_is_killed_is_lost(how: str, tmp_path: Path) -> None:
    """The shard's successor waits for a node, which joins later, and the run goes back to its newest checkpoint."""
    steps = ("--max-steps", str(LONG))  # a dozen may be over before the loss is noticed
    with cluster(tmp_path, SPARE) as net, running(net, tmp_path, *FLAGS, *steps) as run:
        run.at_step(5)
        node = run.node_of("trainer_1", net)
        if node.number == 0:
            node = run.node_of("trainer_0", net)
        added = net.nodes[NODES]
        if how == "cut":
            node.cut()
        else:
            lose(net, node)
        joining = threading.Thread(target=net.start_node, args=(added,), kwargs={"cpus": 1})
        joining.start()
        run.end()
        joining.join(DEADLINE_S)
        assert_steps_once(run.rows(), LONG, bound=1)
        assert run.incidents(), "the loss is told"
