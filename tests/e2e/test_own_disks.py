"""A run in object storage on two nodes without a file system that they share: writers on the node without the driver
checkpoint, the driver is killed between their parts and the seal, and the run continues from the other node."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from namespaces import NamespaceNode, address, fabric, not_possible
from nodes_support import DEADLINE_S, OUTPUTS, NodesRun, assert_steps_once, on_disk, running, start_store, store_environ
from run_support import TINY

from trireme.checkpoint.manifest import Manifest

# reason: a node is a set of namespaces, which need root and iproute2
without = pytest.mark.skipif(bool(not_possible()), reason=not_possible())
pytestmark = [pytest.mark.long, without]

STEPS, EVERY, BOUND = 6, 2, 1
STORE = 2
"""The number of the machine with the store; the two before it are the cluster."""
CPUS = 2
"""Of each node: one for a replica, two for the shards, and one for the orchestrator."""
FLAGS = (
    *(*TINY, "--max-steps", str(STEPS), "--trainer.shards", "2", "--inference.replicas", "1", "--resume", "auto"),
    *("--checkpoint.every", str(EVERY), "--timeouts.heartbeat-s", "300"),
)
STORED = """
import json, sys
from trireme.checkpoint.bucket import Bucket
from trireme.checkpoint.stored_run import StoredRun
bucket = Bucket(sys.argv[1])
head = bucket.read("HEAD")
print(json.dumps([list(StoredRun.from_json(head[0]).of_branch()), bucket.keys("commits")]))
"""


def stored_on(node: NamespaceNode, store: str, environ: dict[str, str]) -> tuple[list[int], list[str]]:
    """Returns the steps that the store has checkpoints of, and the keys of all objects of checkpoints, finished or
    not."""
    process = node.run(sys.executable, "-c", STORED, f"{store}/run", environ=environ)
    assert process.returncode == 0, process.stderr
    steps, keys = json.loads(process.stdout)
    return steps, keys


def drafts(node: NamespaceNode, directory: Path) -> list[str]:
    """Returns the files of drafts on a node's disk."""
    partial_files = on_disk(node, directory / OUTPUTS / "run").glob("checkpoints/*.partial-*/**/*")
    return [str(file) for file in partial_files if file.is_file()]


def assert_far(run: NodesRun) -> None:
    assert "parts of checkpoints travel through s3://" in run.out
    assert "AWS_SECRET_ACCESS_KEY" not in (run.root / "config.json").read_text()


def test_two_nodes_share_a_run_and_no_file_system(tmp_path: Path) -> None:
    environ = store_environ(address(STORE))  # of the drivers alone: actors get it from them
    with fabric(STORE + 1) as net:
        outside = net.nodes.pop()
        store = start_store(outside, tmp_path)
        net.start_ray(cpus=CPUS)
        one, two = net.nodes

        killed = {**environ, "TRIREME_FAULTS": f"commit.gathered@{STEPS // EVERY}=kill"}
        with running(net, tmp_path, *FLAGS, store=store, environ=killed, own_disk=one) as first:
            first.process.wait(DEADLINE_S)
        assert_far(first)
        before = first.rows()
        assert [row["step"] for row in before] == list(range(STEPS)), first.out[-3000:]
        steps, keys = stored_on(outside, store, environ)
        assert steps
        assert STEPS not in steps, "a checkpoint that was not sealed is none"
        assert [key for key in keys if f"step_{STEPS:06d}" in key], "although its parts have arrived"

        with running(net, tmp_path, *FLAGS, store=store, environ=environ, own_disk=two) as second:
            second.end()
        assert_far(second)
        assert "was brought from s3://" in second.out
        rows: list[dict[str, Any]] = second.rows()
        assert_steps_once(rows, STEPS, BOUND)
        resumed = next(row["step"] for row in rows if row["attempt"] > 1)
        assert resumed == max(steps)
        assert rows[:resumed] == before[:resumed]
        assert Manifest.verified(second.root / "checkpoints" / f"step_{STEPS:06d}").shards == 2
        steps, keys = stored_on(outside, store, environ)
        assert STEPS in steps
        assert not [key for key in keys if f"/000001/step_{STEPS:06d}" in key], "what was not sealed is swept"
        assert not drafts(one, tmp_path) + drafts(two, tmp_path)
