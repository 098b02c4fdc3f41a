"""A node that does not share the run directory: may its own disk hold files at that path?"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from trireme.checkpoint.files import FileRecord
from trireme.checkpoint.pieces import Piece
from trireme.checkpoint.store import HEAD, STAGING
from trireme.core.errors import StorageFailed
from trireme.launch import node_files
from trireme.launch.node_files import NodeFiles, NodeView, look, prepare
from trireme.launch.node_files import _file_system as file_system_of


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_files, "_file_system", lambda _: "ext4")
    monkeypatch.setattr(os, "nice", lambda _: 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "outputs" / "run"


def nonce_of(root: Path, text: str) -> Path:
    (root / "logs").mkdir(parents=True)
    (root / "logs" / HEAD).write_text(text)
    return root / "logs" / HEAD


def test_whoever_sees_the_file_of_the_driver_shares_its_directory(root: Path) -> None:
    nonce = nonce_of(root, "attempt 1")
    assert look(nonce, "attempt 1", root) == NodeView(os.uname().nodename, True)
    assert not (root / STAGING).exists()


@pytest.mark.parametrize("seen", ["", "attempt 1 of another run"])
def test_who_does_not_makes_a_place_for_its_own_files(root: Path, seen: str) -> None:
    nonce = nonce_of(root, seen)
    assert look(nonce, "attempt 1", root) == NodeView(os.uname().nodename, False)
    assert (root / STAGING).exists()


def test_drafts_of_earlier_attempts_are_deleted_and_other_files_stay(root: Path) -> None:
    assert prepare(root, None) == ""
    for name in ("step_000002.partial-1", "step_000001"):
        (root / "checkpoints" / name / "trainer").mkdir(parents=True)
    assert prepare(root, None) == ""
    assert [entry.name for entry in (root / "checkpoints").iterdir()] == ["step_000001"]


def test_a_run_directory_of_another_run_is_left_alone(root: Path) -> None:
    root.mkdir(parents=True)
    (root / HEAD).write_text("{}")
    assert prepare(root, None) == "another run has its run directory there"
    assert [entry.name for entry in root.iterdir()] == [HEAD]


def test_nothing_lies_where_ray_deletes_it_or_in_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "which Ray deletes" in prepare(root, root.parent)
    monkeypatch.setattr(node_files, "_file_system", lambda _: "tmpfs")
    assert prepare(root, None) == "it is kept in memory (tmpfs)"


def test_a_path_that_cannot_be_made_says_why(root: Path) -> None:
    root.parent.parent.joinpath("outputs").write_text("a file")
    assert "ile exists" in prepare(root, None) or "Not a directory" in prepare(root, None)


def test_only_a_place_for_staging_is_deleted_from(root: Path) -> None:
    commit = root / "checkpoints" / "step_000002"
    commit.mkdir(parents=True)
    NodeFiles().remove(commit)
    assert commit.exists(), "a run directory, as it has no mark"
    prepare(root, None)
    NodeFiles().remove(commit)
    assert not commit.exists()
    NodeFiles().remove(commit)


def test_nothing_is_written_where_another_driver_has_its_run_directory(root: Path) -> None:
    commit, record = root / "checkpoints" / "step_000002", FileRecord(HEAD, 1, "0")
    commit.mkdir(parents=True)
    (commit / "kept").touch()
    for directory in (root, commit):
        with pytest.raises(StorageFailed, match="no place for staging any more"):
            NodeFiles().take(directory, Piece(record, 0, 1), np.zeros(1, np.uint8))
    with pytest.raises(StorageFailed, match="no place for staging any more"):
        NodeFiles().adopt(commit.with_name("step_000002.partial-1"), commit)
    assert [file.name for file in root.rglob("*") if file.is_file()] == ["kept"]


def test_the_file_system_of_a_path_is_known() -> None:
    assert file_system_of(Path("/proc/self/status")) == "proc"
    assert file_system_of(Path("/proc/none/at/all")) == "proc"
