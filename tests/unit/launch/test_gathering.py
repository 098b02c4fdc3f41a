"""Parts of commits on nodes that do not see the run directory. The nodes are other directories."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from checkpoint_support import manifest as make_manifest
from far_support import Disk, far_nodes, without_ray

from trireme.checkpoint import pieces
from trireme.checkpoint.copies import copies
from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.checkpoint.manifest import Manifest, step_name
from trireme.checkpoint.pieces import held
from trireme.checkpoint.store import STAGING, Head
from trireme.core.errors import BadInput, DiskFull, RoomFailed, StorageFailed
from trireme.launch import gathering, node_files
from trireme.launch.gathering import AskedNodes, FarNodes, sort_out
from trireme.launch.node_files import NodeView
from trireme.process import faults, waits

DRAFT = "checkpoints/step_000002.partial-1"
LIMIT_S = 10.0
NEW_RUN = Head("cafecafe", "aaaaaaaa", 1, None)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_ray(monkeypatch)
    monkeypatch.setattr(faults, "_passed", faults.Counter())
    monkeypatch.setattr(gathering, "cut", lambda files: pieces.cut(files, 4))
    (tmp_path / "run" / DRAFT).mkdir(parents=True)
    return tmp_path / "run"


def far(root: Path) -> tuple[FarNodes, list[Disk]]:
    """Two nodes; the trainer has a shard on each, and the orchestrator is on the second."""
    return far_nodes(root, ("trainer",), ("trainer", "orchestrator"))


def written(root: Path, disks: list[Disk]) -> list[FileRecord]:
    """What the rooms have written of a commit: one file where the run directory is, and three on the nodes."""
    return [
        write_bytes(root / DRAFT / "trainer", "0.distcp", b"here"),
        write_bytes(disks[0].own / DRAFT / "trainer", "1.distcp", b"first node"),
        write_bytes(disks[1].own / DRAFT / "trainer", "2.distcp", b"second node"),
        write_bytes(disks[1].own / DRAFT / "orchestrator", "state.json", b"{}"),
    ]


def test_files_are_gathered_from_where_they_were_written(root: Path) -> None:
    nodes, disks = far(root)
    files = written(root, disks)
    nodes.gather(root / DRAFT, files, LIMIT_S)
    assert held(root / DRAFT, files, contents=True) == files


def test_what_is_there_already_costs_no_call(root: Path) -> None:
    nodes, disks = far(root)
    files = written(root, disks)[:1]
    nodes.gather(root / DRAFT, files, LIMIT_S)
    assert [disk.calls for disk in disks] == [[], []]


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("pieces.read@2=tear", StorageFailed, "bytes arrived of a piece"),
        ("pieces.read@2=corrupt", StorageFailed, "checksum"),
        ("pieces.write@2=full", DiskFull, "MiB free"),
    ],
)
def test_a_file_that_does_not_arrive_whole_is_no_part_of_a_commit(
    root: Path, monkeypatch: pytest.MonkeyPatch, fault: str, error: type[Exception], said: str
) -> None:
    nodes, disks = far(root)
    files = written(root, disks)
    monkeypatch.setenv("TRIREME_FAULTS", fault)
    with pytest.raises(error, match=said):
        nodes.gather(root / DRAFT, files, LIMIT_S)
    assert [file.name for file in (root / DRAFT).rglob("*") if file.is_file()] == ["0.distcp"]


def test_a_node_that_is_lost_in_the_middle_makes_a_missed_commit_and_is_asked_anew(root: Path) -> None:
    nodes, disks = far(root)
    files = written(root, disks)
    disks[1].lost_at = 3
    with pytest.raises(StorageFailed, match="a part of the commit was not gathered: the node was lost"):
        nodes.gather(root / DRAFT, files, LIMIT_S)
    assert held(root / DRAFT, files) == files[:2], "what had arrived whole"
    disks[1].lost_at = None
    nodes.gather(root / DRAFT, files, LIMIT_S)
    assert held(root / DRAFT, files, contents=True) == files
    assert disks[1].started == 2


def test_a_file_that_is_nowhere_is_named(root: Path) -> None:
    nodes, disks = far(root)
    files = [*written(root, disks), FileRecord("trainer/3.distcp", 4, "")]
    with pytest.raises(StorageFailed, match=r"trainer/3.distcp was written, and is neither here nor on far0, far1"):
        nodes.gather(root / DRAFT, files, LIMIT_S)


def test_a_draft_is_deleted_where_it_was_written(root: Path) -> None:
    nodes, disks = far(root)
    files = written(root, disks)
    nodes.clear(root / DRAFT)
    assert [held(disk.own / DRAFT, files) for disk in disks] == [[], []]
    disks[0].lost_at = 0
    nodes.clear(root / DRAFT)  # which the next attempt does again


def manifest_of(files: list[FileRecord]) -> Any:
    return type("Stand", (), {"files": tuple(files)})()


def test_each_node_gets_what_its_rooms_load_for_as_long_as_they_load(root: Path) -> None:
    nodes, disks = far(root)
    commit = root / "checkpoints" / "step_000002"
    names = ("trainer/.metadata", "trainer/0.distcp", "orchestrator/state.json", "inference/model.safetensors")
    files = [write_bytes(commit / Path(name).parent, Path(name).name, name.encode()) for name in names]
    wanted = [files[:2], files[:3]]
    with nodes.brought(commit, manifest_of(files), LIMIT_S):
        for disk, own in zip(disks, wanted, strict=True):
            there = disk.own / "checkpoints" / "step_000002"
            assert held(there, files, contents=True) == own
    assert [list((disk.own / "checkpoints").iterdir()) for disk in disks] == [[], []]
    assert held(commit, files, contents=True) == files


def test_what_a_node_has_already_is_not_brought_again_unless_it_is_altered(root: Path) -> None:
    nodes, disks = far(root)
    commit = root / "checkpoints" / "step_000002"
    files = [write_bytes(commit / "trainer", name, name.encode()) for name in ("0", "1")]
    write_bytes(disks[0].own / "checkpoints" / "step_000002" / "trainer", "0", b"0")
    write_bytes(disks[0].own / "checkpoints" / "step_000002" / "trainer", "1", b"x")
    with nodes.brought(commit, manifest_of(files), LIMIT_S):
        assert disks[0].calls.count("take") == 1
        assert held(disks[0].own / "checkpoints" / "step_000002", files, contents=True) == files


def test_a_node_that_is_lost_while_it_gets_a_commit_ends_the_attempt(root: Path) -> None:
    nodes, disks = far(root)
    commit = root / "checkpoints" / "step_000002"
    files = [write_bytes(commit / "trainer", "0", b"0")]
    disks[0].lost_at = 2
    with pytest.raises(RoomFailed), nodes.brought(commit, manifest_of(files), LIMIT_S):
        pytest.fail("nothing may load half a commit")


def sealed(root: Path, disks: list[Disk], step: int) -> tuple[Path, Path, Manifest]:
    """A draft whose parts are here and on the nodes, and the commit that was made of it."""
    draft = root / "checkpoints" / f"{step_name(step)}.partial-1"
    files = [
        write_bytes(disk / draft.relative_to(root) / room, "part", f"{room} of {step}".encode())
        for disk, room in ((root, "inference"), (disks[0].own, "trainer"), (disks[1].own, "orchestrator"))
    ]
    manifest = replace(make_manifest(step), files=tuple(files))
    draft.mkdir(parents=True, exist_ok=True)
    return draft, root / "checkpoints" / step_name(step), manifest


def publish(nodes: FarNodes, root: Path, disks: list[Disk], step: int) -> tuple[Path, Path, Manifest]:
    draft, commit, manifest = sealed(root, disks, step)
    nodes.gather(draft, manifest.files, LIMIT_S)
    write_bytes(draft, "manifest.json", manifest.to_json().encode())
    draft.rename(commit)
    return draft, commit, manifest


class TestTheCopy:
    def test_the_first_node_keeps_the_newest_commit_with_its_rows_and_the_others_nothing(self, root: Path) -> None:
        nodes, disks = far(root)
        NEW_RUN.write(root / "HEAD")
        for step in (2, 4):
            (root / "metrics.jsonl").write_text(f"rows of {step}\n")
            nodes.sealed(*publish(nodes, root, disks, step), LIMIT_S)
            (copy,) = copies(disks[0].own)
            assert copy.manifest == Manifest.verified(disks[0].own / "checkpoints" / step_name(step))
            assert (disks[0].own / "metrics.jsonl").read_text() == f"rows of {step}\n"
            assert list((disks[1].own / "checkpoints").iterdir()) == []

    def test_what_the_node_wrote_itself_does_not_travel_back(self, root: Path) -> None:
        nodes, disks = far(root)
        draft, commit, manifest = publish(nodes, root, disks, 2)
        nodes.sealed(draft, commit, manifest, LIMIT_S)
        pieces_of_others = list(pieces.cut([f for f in manifest.files if not f.path.startswith("trainer/")], 4))
        beside = list(pieces.cut([FileRecord("manifest.json", len(manifest.to_json()), "")], 4))
        assert disks[0].calls.count("take") == len(pieces_of_others) + len(beside)

    def test_a_node_that_is_lost_leaves_the_copy_before(self, root: Path) -> None:
        nodes, disks = far(root)
        NEW_RUN.write(root / "HEAD")
        nodes.sealed(*publish(nodes, root, disks, 2), LIMIT_S)
        made = publish(nodes, root, disks, 4)
        disks[0].lost_at = len(disks[0].calls) + 3
        with pytest.raises(StorageFailed, match="the copy was not made: the node was lost"):
            nodes.sealed(*made, LIMIT_S)
        assert [copy.manifest.step for copy in copies(disks[0].own)] == [2]

    def test_the_copy_is_what_a_resume_loads_and_stays(self, root: Path) -> None:
        nodes, disks = far(root)
        NEW_RUN.write(root / "HEAD")
        _, commit, manifest = made = publish(nodes, root, disks, 2)
        nodes.sealed(*made, LIMIT_S)
        taken = disks[0].calls.count("take")
        with nodes.brought(commit, manifest, LIMIT_S):
            assert disks[0].calls.count("take") == taken
        assert [copy.manifest.step for copy in copies(disks[0].own)] == [2]

    def test_a_copy_that_a_resume_of_another_lineage_changes_is_no_copy_any_more(self, root: Path) -> None:
        nodes, disks = far(root)
        _, commit, manifest = made = publish(nodes, root, disks, 2)
        nodes.sealed(*made, LIMIT_S)
        other = replace(manifest, files=(write_bytes(commit / "trainer", "part", b"other bytes"),))
        with nodes.brought(commit, other, LIMIT_S):
            assert copies(disks[0].own) == []
        assert list((disks[0].own / "checkpoints").iterdir()) == []


def test_the_process_that_looks_on_a_node_is_the_one_that_has_its_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, far = Disk(root, root), Disk(root, root.parent / "far")
    disks, ended = {"a": shares, "b": far}, []
    monkeypatch.setattr(node_files, "_file_system", lambda _: "ext4")
    monkeypatch.setattr(gathering, "create_files", lambda node: disks[node].start(node))
    monkeypatch.setattr(waits, "get_all", lambda refs, **_: [ref() for ref in refs])
    monkeypatch.setattr(ray, "kill", ended.append)
    (root / "logs").mkdir()
    (root / "logs" / "HEAD").write_text("attempt 1")
    asked = AskedNodes.ask(root / "logs" / "HEAD", root, {"a": ["trainer", "orchestrator"], "b": ["trainer"]})
    nodes, _ = asked.found(("trainer", "orchestrator"), None, LIMIT_S, lambda *_: None)
    assert nodes is not None
    nodes.clear(root / DRAFT)
    assert (far.calls, far.started) == (["look", "remove"], 1)
    assert [actor.disk for actor in ended] == [shares], "it has nothing to give"


HERE, FAR = NodeView("here", True), NodeView("far", False)
ROOMS = {"a": ["trainer", "orchestrator"], "b": ["trainer"], "c": ["inference"]}
HOLDING = ("trainer", "orchestrator")


class TestWhoSeesTheDirectory:
    def test_all_do(self, tmp_path: Path) -> None:
        nodes, said = sort_out({"a": HERE, "b": HERE, "c": HERE}, ROOMS, tmp_path, HOLDING)
        assert (nodes, said) == (None, "files: all 3 nodes of the run see its directory")

    def test_one_node_may_have_the_only_copy_of_each_commit(self, tmp_path: Path) -> None:
        here = replace(HERE, host=os.uname().nodename)
        _, said = sort_out({"a": here}, ROOMS, tmp_path, HOLDING)
        assert f"Commits are in {tmp_path} there, and no node keeps a copy" in said
        assert "is lost with its disk" in said

    def test_object_storage_outlives_that_node(self, tmp_path: Path) -> None:
        here = replace(HERE, host=os.uname().nodename)
        _, said = sort_out({"a": here}, ROOMS, tmp_path, HOLDING, "s3://bucket/run")
        assert said.endswith("on one node; commits are kept in s3://bucket/run")
        _, said = sort_out({"a": here, "c": replace(FAR, unfit="no disk")}, ROOMS, tmp_path, HOLDING, "s3://bucket/run")
        assert said.endswith("none of them can keep a copy, so its commits are kept in s3://bucket/run")

    def test_one_node_that_is_not_the_drivers_shares_the_directory_with_it(self, tmp_path: Path) -> None:
        nodes, said = sort_out({"a": HERE}, ROOMS, tmp_path, HOLDING)
        assert nodes is None
        assert said == "files: here, which has all actors, and the driver's node see the run directory"

    def test_a_node_that_does_not_is_named_with_its_rooms(self, tmp_path: Path) -> None:
        nodes, said = sort_out({"a": HERE, "b": FAR, "c": HERE}, ROOMS, tmp_path, HOLDING)
        assert nodes is not None
        assert f"far (trainer) does not see {tmp_path}: parts of commits" in said

    def test_one_that_has_no_place_for_its_parts_is_refused_with_the_reason(self, tmp_path: Path) -> None:
        unfit = replace(FAR, unfit="it is kept in memory (tmpfs)")
        with pytest.raises(BadInput) as refused:
            sort_out({"a": HERE, "b": unfit}, ROOMS, tmp_path / "run", HOLDING)
        assert f"given: run.output_dir = {tmp_path}, which not all nodes share" in str(refused.value)
        assert "far (trainer): it is kept in memory (tmpfs)" in str(refused.value)

    def test_replicas_need_no_place(self, tmp_path: Path) -> None:
        _, said = sort_out({"a": HERE, "c": replace(FAR, unfit="no disk")}, ROOMS, tmp_path, HOLDING)
        assert "none of them can keep a copy, so each commit is here alone" in said

    def test_the_copy_is_on_another_machine_if_there_is_one(self, tmp_path: Path) -> None:
        here = replace(FAR, host=os.uname().nodename)
        rooms = {"a": ["trainer"], "b": ["inference"], "c": ["trainer"]}
        nodes, said = sort_out({"a": here, "b": FAR, "c": replace(FAR, host="farther")}, rooms, tmp_path, HOLDING)
        assert nodes is not None
        assert [node.node for node in nodes.nodes] == ["c", "b", "a"]
        assert said.endswith("farther keeps a copy of the newest commit")

    def test_a_node_that_shares_it_but_saw_the_file_too_late_is_no_other_node(self, tmp_path: Path) -> None:
        """Deleting what it stages would delete commits."""
        (tmp_path / STAGING).touch()
        nodes, _ = sort_out({"a": HERE, "b": FAR}, ROOMS, tmp_path, HOLDING)
        assert nodes is None
        assert not (tmp_path / STAGING).exists()
