"""A run over nodes that do not share its directory: its commits are whole where the driver is, and a resume brings each
node what it loads."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cluster_support import NODES, Nodes, ask, blind_to, cluster_of_one
from resume_support import DETERMINISTIC, assert_same_run, comparable, contents, rows_of, run_and_kill
from run_support import Ended, run_rl

from trireme.checkpoint.manifest import Manifest
from trireme.core.errors import EXIT_OK
from trireme.tools.timeline import json_lines

BLIND = 3
"""Nodes beside the head. All have one logical CPU, so each of the four actors has a node of its own."""


def add_blind_nodes(nodes: Nodes, shared: Path, directory: Path) -> list[Path]:
    """Adds nodes that do not see `shared`. Returns what each of them sees in its place."""
    disks = [directory / f"disk_{number}" for number in range(BLIND)]
    for number, disk in enumerate(disks, start=2):
        disk.mkdir()
        nodes.join(blind_to(shared, disk))
        assert any(ask(nodes.address, NODES, number) for _ in range(5)), "one at a time, as they look for free ports"
    return disks


def copies(disks: list[Path]) -> list[Path]:
    """Commits and drafts that are left on the nodes."""
    return [entry for disk in disks for entry in disk.glob("run/checkpoints/*")]


@pytest.mark.long
def test_shards_and_orchestrator_on_nodes_without_the_run_directory(tmp_path: Path, deterministic: Ended) -> None:
    """Killed after its second commit and resumed, the run is that of nodes with one directory, bit for bit. Then its
    directory is lost, and it continues from the copy on another node, with another number of shards."""
    shared = tmp_path / "outputs"
    shared.mkdir()
    with cluster_of_one(1) as nodes:
        disks = add_blind_nodes(nodes, shared, tmp_path)
        flags = (*DETERMINISTIC, "--cluster.address", nodes.address)

        out = run_and_kill(shared, flags, at="commit.renamed@2")
        blind = re.search(r"files: (.*) not see", out.replace("\n", " "))
        assert blind, out
        assert len(blind[1].split(";")) == BLIND
        assert "rooms on 4 nodes" in out
        assert Manifest.verified(shared / "run" / "checkpoints" / "step_000004").shards == 2

        resumed = run_rl(shared, *flags, "--resume")
        assert resumed.code == EXIT_OK, resumed.out
        assert_same_run(resumed.root, deterministic.root)

        logs, traces = resumed.root / "logs" / "attempt_2", resumed.root / "trace" / "attempt_2"
        for name in ("trainer_0", "trainer_1", "orchestrator_0", "inference_0"):
            assert (logs / f"{name}.log").stat().st_size, name
            assert len(list(json_lines(traces / f"{name}.json"))) > 10, name
        (copy,) = copies(disks)
        assert contents(copy) == contents(resumed.root / "checkpoints" / "step_000006")

        shutil.rmtree(resumed.root)
        fewer = run_rl(shared, *flags, "--resume", "--trainer.shards", "1", "--max-steps", "7")
        assert fewer.code == EXIT_OK, fewer.out
        assert "step_000006 was brought back from its copy" in fewer.out.replace("\n", " ")
        rows = comparable(rows_of(fewer.root / "metrics.jsonl"))
        assert rows[:6] == comparable(rows_of(deterministic.root / "metrics.jsonl"))
        assert Manifest.verified(fewer.root / "checkpoints" / "step_000007").shards == 1
        steps = {Manifest.verified(copy).step for copy in copies(disks)}
        assert steps in ({7}, {6, 7}), "a node that no longer takes part keeps the copy that it had"
