"""A run whose directory is lost comes back from the copy of its newest commit on another node."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_support import append_rows, commit, snapshot, steps
from far_support import Disk, without_ray

from trireme.checkpoint.copies import copies
from trireme.checkpoint.manifest import Manifest
from trireme.checkpoint.store import STAGING, CheckpointStore, Head
from trireme.config.load import load
from trireme.core.errors import RoomFailed, StorageFailed
from trireme.launch import restoring
from trireme.process import faults


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A node with a copy of the commit of step 4."""
    without_ray(monkeypatch)
    monkeypatch.setattr(faults, "_passed", faults.Counter())
    disk = Disk(tmp_path / "out" / "run", tmp_path / "node")
    disk.own.mkdir()
    store = CheckpointStore(disk.own)
    store.write_head(Head("cafecafe", "aaaaaaaa", 1, None))
    commit(store, 4)
    append_rows(disk.own / "metrics.jsonl", [{"step": step} for step in range(4)])
    (disk.own / "config.json").write_text("{}")
    (disk.own / STAGING).touch()
    held = {"empty": [], "far": copies(disk.own)}
    monkeypatch.setattr(restoring, "connected", lambda *_: nullcontext())
    monkeypatch.setattr(restoring, "ray", SimpleNamespace())
    monkeypatch.setattr(restoring, "_ask", lambda *_: held)
    monkeypatch.setattr(restoring, "_address", lambda node: f"address of {node}")
    monkeypatch.setattr(restoring, "create_files", disk.start)
    return disk


def bring_back(disk: Disk, *flags: str) -> list[str]:
    common = ["--model.name", "./m", "--env.id", "sort", "--orchestrator.batch-size", "2"]
    place = ["--inference.sampling.max-tokens", "3", "--run.output-dir", str(disk.root.parent), "--run.name", "run"]
    config: Any = load([*common, *place, "--cluster.address", "10.0.0.1:6379", *flags], {}).config
    said: list[str] = []
    restoring.bring_back(config, said.append)
    return said


def test_a_lost_directory_comes_back_whole(disk: Disk) -> None:
    (text,) = bring_back(disk, "--resume")
    assert "step_000004 was brought back from its copy on address of far" in text
    store = CheckpointStore(disk.root)
    assert Manifest.verified(store.commit(4)).step == 4
    left_out = {STAGING, "driver.lock"}
    here, there = snapshot(disk.root), snapshot(disk.own)
    assert {n: f for n, f in here.items() if n not in left_out} == {n: f for n, f in there.items() if n not in left_out}
    assert (disk.own / STAGING).exists(), "the copy stays"


@pytest.mark.parametrize("flags", [(), ("--resume.dir", "/somewhere")])
def test_only_a_resume_looks_for_copies(disk: Disk, flags: tuple[str, ...]) -> None:
    assert bring_back(disk, *flags) == []
    assert not disk.root.exists()


def test_a_directory_with_a_commit_is_left_as_it_is(disk: Disk) -> None:
    commit(CheckpointStore(disk.root), 2)
    assert bring_back(disk, "--resume") == []
    assert steps(CheckpointStore(disk.root)) == [2]


def test_a_copy_that_does_not_arrive_whole_is_no_commit_and_the_next_call_begins_anew(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIREME_FAULTS", "pieces.read@2=corrupt")
    with pytest.raises(StorageFailed, match="checksum"):
        bring_back(disk, "--resume")
    assert steps(CheckpointStore(disk.root)) == []
    bring_back(disk, "--resume")
    assert steps(CheckpointStore(disk.root)) == [4]


def test_a_run_that_has_begun_anew_gets_no_copy_of_the_run_before(disk: Disk) -> None:
    disk.root.mkdir(parents=True)
    CheckpointStore(disk.root).write_head(Head("feedfeed", "bbbbbbbb", 1, None))
    before = snapshot(disk.root)
    assert bring_back(disk, "--resume") == []
    assert snapshot(disk.root) == before
    CheckpointStore(disk.root).write_head(Head("cafecafe", "bbbbbbbb", 1, None))
    assert len(bring_back(disk, "--resume")) == 1, "its own"


@pytest.mark.parametrize("half", ["step_000002", "step_000004"])
def test_a_part_of_a_commit_that_was_staged_here_is_no_commit(disk: Disk, half: str) -> None:
    (disk.root / "checkpoints" / half / "trainer").mkdir(parents=True)
    (disk.root / STAGING).touch()
    assert len(bring_back(disk, "--resume", "auto")) == 1
    assert steps(CheckpointStore(disk.root)) == [4]
    assert Manifest.verified(CheckpointStore(disk.root).commit(4)).step == 4


def test_an_older_copy_here_makes_way_for_a_newer_one_there(disk: Disk) -> None:
    store = CheckpointStore(disk.root)
    disk.root.mkdir(parents=True)
    store.write_head(Head("cafecafe", "bbbbbbbb", 0, None))
    commit(store, 6, attempt=0)
    (disk.root / STAGING).touch()
    assert len(bring_back(disk, "--resume")) == 1
    assert steps(store) == [4]
    assert bring_back(disk, "--resume") == [], "it is as new as the copy there"


def test_parts_without_any_copy_make_way_for_a_new_run(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "_ask", lambda *_: {"far": []})
    (disk.root / "checkpoints" / "step_000002").mkdir(parents=True)
    (disk.root / STAGING).touch()
    assert bring_back(disk, "--resume", "auto") == []
    assert steps(CheckpointStore(disk.root)) == []


class Nodes:
    """Stands for Ray: nodes answer, live on without an answer, or are lost."""

    def __init__(self, answers: dict[str, Any], lost: set[str]) -> None:
        self.answers, self.lost, self.now = answers, lost, 0.0

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        task = SimpleNamespace(options=self.placed)
        monkeypatch.setattr(restoring, "ray", SimpleNamespace(remote=lambda **_: lambda _: task, nodes=self.nodes))
        monkeypatch.setattr(restoring, "on_node", lambda node: node)
        monkeypatch.setattr(restoring.waits, "ready", self.ready)
        monkeypatch.setattr(restoring, "time", SimpleNamespace(monotonic=lambda: self.now))

    def placed(self, scheduling_strategy: str) -> Any:
        return SimpleNamespace(remote=lambda _: f"ref {scheduling_strategy}")

    def nodes(self) -> list[dict[str, Any]]:
        names = ("a", "b", "c")
        alive = {name: name not in self.lost or self.now < 5 for name in names}
        return [{"NodeID": name, "NodeManagerAddress": f"at {name}", "Alive": alive[name]} for name in names]

    def ready(self, refs: dict[str, str], timeout_s: float) -> dict[str, Any]:
        self.now += timeout_s
        return {ref: self.answers[ref[4:]] for ref in refs if ref[4:] in self.answers}


class TestNodesThatDoNotAnswer:
    def test_a_lost_one_is_said_and_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nodes, said = Nodes({"a": [], "b": []}, {"c"}), []
        nodes.use(monkeypatch)
        assert restoring._ask(Path("/run"), 600.0, said.append) == {"a": [], "b": []}
        assert said == ["node at c was lost before it said if it holds a copy of /run: its disk is not looked at"]
        assert nodes.now < 10, "as soon as the cluster knows it"

    def test_one_that_dies_with_an_answer_on_its_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nodes, said = Nodes({"a": [], "b": []}, {"c"}), []
        nodes.use(monkeypatch)
        nodes.now = 4.5
        nodes.answers["c"] = RoomFailed("node at c died")
        restoring._ask(Path("/run"), 600.0, said.append)
        assert len(said) == 1
        assert nodes.now < 10

    def test_a_living_one_is_named_after_the_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nodes = Nodes({"a": []}, {"c"})
        nodes.use(monkeypatch)
        with pytest.raises(RoomFailed, match=r"waited 60 s .* for node at b, .* and got no answer"):
            restoring._ask(Path("/run"), 60.0, lambda _: None)

    def test_an_error_of_a_living_one_ends_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Nodes({"a": [], "b": RoomFailed("it has no such module"), "c": []}, set()).use(monkeypatch)
        with pytest.raises(RoomFailed, match="no such module"):
            restoring._ask(Path("/run"), 60.0, lambda _: None)
