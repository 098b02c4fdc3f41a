"""Nodes that join a run are examined once; what is wrong is said with the node's name, and ends nothing."""

from __future__ import annotations

import io
import time
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace

import pytest
from doctor_support import HEAD, SECOND, THIRD, broken, changed, healthy
from plan_support import plan
from rich.console import Console

from trireme.config import CommonConfig
from trireme.core.errors import RoomFailed
from trireme.doctor.examination import Examination
from trireme.launch import doctor, joiners
from trireme.launch.joiners import Joiners


class Cluster:
    """Stands for Ray's. Names of nodes stand for Ray's ids."""

    def __init__(self) -> None:
        self.nodes = [HEAD, SECOND]
        self.lost: set[str] = set()
        self.found: Examination | Exception = healthy()
        self.asked: list[set[str]] = []
        self.console = Console(file=io.StringIO(), width=1000)

    def joined(self) -> list[object]:
        known = {node.name: node for node in healthy().nodes}
        return [SimpleNamespace(name=n, id=known[n].id, alive=n not in self.lost) for n in self.nodes]

    def examine(self, config: CommonConfig, among: Collection[str]) -> Examination:
        self.asked.append(set(among))
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    @property
    def said(self) -> list[str]:
        assert isinstance(self.console.file, io.StringIO)
        return self.console.file.getvalue().splitlines()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(joiners, "joined_nodes", made.joined)
    monkeypatch.setattr(joiners, "examine", made.examine)
    monkeypatch.setattr(joiners, "join_address", lambda: f"{HEAD}:6379")
    return made


def join_third(cluster: Cluster, found: Examination | Exception) -> list[str]:
    """Returns what is said when the third node joins and `found` is found."""
    watch = Joiners(plan(), cluster.console)
    watch.look()
    assert cluster.asked == []
    assert cluster.said == [], "nodes that were there are known"
    cluster.nodes.append(THIRD)
    cluster.found = found
    watch.look()
    watch.look()
    assert cluster.asked == [{THIRD}], "once"
    return cluster.said


def test_a_healthy_node_has_one_line(cluster: Cluster) -> None:
    (line,) = join_third(cluster, healthy())
    assert line.startswith(f"joined: {THIRD}; 3 nodes reach each other by eth0")


def test_what_is_wrong_with_it_is_a_warning(cluster: Cluster) -> None:
    """Even what would have refused the run at its start."""
    _, line = join_third(cluster, changed(THIRD, open_files=1000))
    assert line.startswith(f"warning: node {THIRD}: a process may open 1,000 files; expected: 8,192 or more")
    assert f"to do: on {THIRD}: `ulimit -n 65536`" in line


def test_of_the_head_only_its_connections_to_it_are_told(cluster: Cluster) -> None:
    """The head's own faults were told at the start."""
    reached = broken(HEAD, THIRD)
    both = changed(HEAD, open_files=1000)
    lines = join_third(cluster, Examination(both.nodes, both.asking, both.facts, links=reached.links))
    assert [line.split(" at ")[0] for line in lines[1:]] == [f"warning: node {HEAD}: it does not reach {THIRD}"]


def test_a_model_that_it_will_be_sent_is_told(cluster: Cluster) -> None:
    lacks = changed(THIRD, model=None)
    lacks = replace(lacks, asking=replace(lacks.asking, model_bytes=5_000_000))
    assert join_third(cluster, lacks)[1:] == [f"model: its files (5.0 MB) will be sent to {THIRD}, once to each node"]


def test_one_that_cannot_be_examined_is_named(cluster: Cluster) -> None:
    (line,) = join_third(cluster, RoomFailed("no answer"))
    assert line == (f"warning: {THIRD} joined, and was not looked at: no answer; `trireme doctor` looks at all nodes")


def test_a_lost_node_is_not_new_when_it_is_seen_again(cluster: Cluster) -> None:
    watch = Joiners(plan(), cluster.console)
    cluster.lost.add(SECOND)
    watch.look()
    cluster.lost.clear()
    watch.look()
    assert cluster.asked == []


def test_it_looks_as_long_as_the_block_takes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiners, "EVERY_S", 0.01)
    cluster.found = ValueError("a fault of this project")
    with Joiners(plan(), cluster.console):
        cluster.nodes.append(THIRD)
        deadline = time.monotonic() + 10
        while not cluster.asked and time.monotonic() < deadline:
            time.sleep(0.01)
    assert cluster.asked == [{THIRD}], "an error of it ends nothing"


def test_warnings_of_many_are_cut(cluster: Cluster) -> None:
    variables = {f"NCCL_{n}": "1" for n in range(20)}
    *_, more = join_third(cluster, changed(THIRD, variables=variables))
    assert more.endswith(" more; `trireme doctor` shows them")
    assert len(cluster.said) == 1 + doctor.WARNINGS + 1
