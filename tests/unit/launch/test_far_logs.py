"""Logs of nodes that do not see the run directory come to it, to the last line; what may be lost is said."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from far_support import Disk, far_nodes, without_ray

from trireme.launch import far_logs
from trireme.launch.far_logs import PATIENCE, GatheredLogs
from trireme.launch.gathering import FarNodes
from trireme.run.tails import GrownFile, append

LOG = "logs/attempt_3/trainer_1.log"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FarNodes, Disk]:
    """One node. Nothing is gathered but at the end of a block."""
    without_ray(monkeypatch)
    monkeypatch.setattr(far_logs, "EVERY_S", 60.0)
    (tmp_path / "run").mkdir()
    nodes, (disk,) = far_nodes(tmp_path / "run", ("trainer",))
    return nodes, disk


def write(disk: Disk, text: str, path: str = LOG) -> None:
    (disk.own / path).parent.mkdir(parents=True, exist_ok=True)
    with (disk.own / path).open("a") as file:
        file.write(text)


def test_each_attempt_brings_what_is_new(node: tuple[FarNodes, Disk]) -> None:
    nodes, disk = node
    write(disk, "of an earlier command\n", "logs/attempt_2/trainer_1.log")
    gathered, said = GatheredLogs(), []
    for attempt, text in ((3, "one\n"), (4, "a replica that outlives its attempt\n")):
        with gathered.following(disk.root, attempt, nodes.nodes, said.append):
            write(disk, text)
    assert (disk.root / LOG).read_text() == "one\na replica that outlives its attempt\n"
    assert not (disk.root / "logs" / "attempt_2").exists()
    assert said == []


def test_while_the_block_takes_it_is_gathered_too(node: tuple[FarNodes, Disk], monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, disk = node
    arrived = threading.Event()

    def append_and_tell(root: Path, part: GrownFile) -> None:
        append(root, part)
        arrived.set()

    monkeypatch.setattr(far_logs, "EVERY_S", 0.001)
    monkeypatch.setattr(far_logs, "append", append_and_tell)
    write(disk, "one\n")
    with GatheredLogs().following(disk.root, 3, nodes.nodes, lambda _: None):
        assert arrived.wait(60)
        assert (disk.root / LOG).read_text() == "one\n"


@pytest.mark.parametrize("rounds", [1, PATIENCE])
def test_what_a_lost_node_may_have_had_is_said_once(
    node: tuple[FarNodes, Disk], monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    nodes, disk = node
    write(disk, "one\n")
    said: list[str] = []
    collector = GatheredLogs().following(disk.root, 3, nodes.nodes, said.append)
    assert collector.gather(nodes.nodes[0])
    disk.lost_at = 0
    for _ in range(rounds - 1):
        assert not collector.gather(nodes.nodes[0])
    with collector:
        pass
    (text,) = said
    assert "logs and traces of node far0 (trainer_1) are not complete here" in text
    assert "the node was lost" in text


def test_a_log_that_never_ends_does_not_hold_up_the_end(
    node: tuple[FarNodes, Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, disk = node
    rounds: list[int] = []

    def append_and_write_on(root: Path, part: GrownFile) -> None:
        append(root, part)
        rounds.append(1)
        assert len(rounds) < 10, "it never ends"
        write(disk, "more\n")

    monkeypatch.setattr(far_logs, "LAST_S", -1.0)
    monkeypatch.setattr(far_logs, "append", append_and_write_on)
    said: list[str] = []
    with GatheredLogs().following(disk.root, 3, nodes.nodes, said.append):
        write(disk, "one\n")
    assert len(rounds) == 1
    assert "there was still more" in said[0]
