"""The head is lost with the driver and Ray's services, and the run directory with it: the same command on another node
continues the run from a store of objects. (That a run continued so is the same bit for bit: test_sft.py.)"""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from chaos_support import PROBLEMS_A_BATCH
from namespaces import Fabric, NamespaceNode, address, fabric, not_possible
from nodes_support import NodesRun, assert_steps_once, lose, running, start_store, store_environ
from resume_support import rows_of

# reason: a node is a set of namespaces, which need root and iproute2
without = pytest.mark.skipif(bool(not_possible()), reason=not_possible())
pytestmark = [pytest.mark.long, without]

STEPS, KILLED_AT, EVERY, BATCH, BOUND = 40, 15, 5, 8, 1
NODES, STORE = 3, 3
"""The nodes of the cluster are the first ones, the machine with the store is the one after them."""
Rows = list[dict[str, Any]]
COUNTED = [
    *("--max-steps", str(STEPS), "--checkpoint.every", str(EVERY), "--resume", "auto"),
    *("--orchestrator.batch-size", str(BATCH), "--checkpoint.keep-last", "2"),
]


def start_again(net: Fabric, nodes: Sequence[NamespaceNode]) -> Fabric:
    """Makes another cluster of these nodes, the first of which is its head."""
    for node in nodes:
        net.stop_node(node)
    again = Fabric(list(nodes))
    again.start_ray()
    return again


def test_the_same_command_elsewhere_continues_the_run(tmp_path: Path) -> None:
    with ExitStack() as ending:
        net = ending.enter_context(fabric(NODES + 1, [tmp_path], environ=store_environ(address(STORE))))
        store = start_store(net.nodes.pop(), tmp_path)
        net.start_ray()
        with running(net, tmp_path, *COUNTED, store=store) as first:
            first.at_step(KILLED_AT)
            head, *rest = net.nodes
            parts = set(first.places(net).values())
            lose(net, head)
            first.process.wait(60)
        assert len(parts) > 1, "actors are lost with the head, or live on nodes without a driver"
        before = first.rows()
        assert KILLED_AT <= len(before) < STEPS
        again = start_again(net, rest)
        shutil.rmtree(first.root)
        with running(again, tmp_path, *COUNTED, store=store) as second:
            second.end()
        assert_continued(second, before)


def assert_continued(run: NodesRun, before: Rows) -> None:
    """It began at a checkpoint, with the rows up to it, and every problem was trained on once."""
    rows = run.rows()
    resumed = next(row["step"] for row in rows if row["attempt"] > 1)
    assert resumed % EVERY == 0, rows
    assert KILLED_AT - 2 * EVERY < resumed <= len(before), "no more is lost than a checkpoint that was under way"
    assert rows[:resumed] == before[:resumed]
    assert "was brought from s3://" in run.out
    assert_steps_once(rows, STEPS, BOUND)
    problems = [group["problem"] for row in rows_of(run.root / "trained.jsonl") for group in row["groups"]]
    assert sorted(problems) == sorted(f"0.{n // PROBLEMS_A_BATCH}.{n % PROBLEMS_A_BATCH}" for n in range(STEPS * BATCH))
