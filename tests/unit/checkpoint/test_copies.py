"""Copies of commits on other nodes: what belongs to one, and which one is the newest."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_support import append_rows, commit, steps, truncate

from trireme.checkpoint.copies import adopt, beside, copies, keep_only, newest, record_of
from trireme.checkpoint.pieces import cut, read_piece
from trireme.checkpoint.store import STAGING, CheckpointStore, Head


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A directory of copies with two commits."""
    made = CheckpointStore(tmp_path / "run")
    made.root.mkdir()
    made.write_head(Head("cafecafe", "aaaaaaaa", 1, None))
    append_rows(made.root / "metrics.jsonl", [{"step": 0}, {"step": 1}])
    (made.root / STAGING).touch()
    for step in (2, 4):
        commit(made, step)
    return made


def test_rows_and_head_belong_to_a_copy(store: CheckpointStore) -> None:
    (store.root / "config.json").write_text("{}")
    (store.root / "STATUS").touch()
    names = ["config.json", "metrics.jsonl", "checkpoints.jsonl", "HEAD"]
    assert [record.path for record in beside(store.root)] == names


def test_rows_that_grow_meanwhile_are_copied_as_they_were(store: CheckpointStore) -> None:
    record = record_of(store.root, "metrics.jsonl")
    append_rows(store.root / "metrics.jsonl", [{"step": 2}])
    sent = b"".join(read_piece(store.root, piece).tobytes() for piece in cut([record], 5))
    assert len(sent) == record.size < (store.root / "metrics.jsonl").stat().st_size
    (store.root / "metrics.jsonl").write_bytes(sent)
    assert record_of(store.root, "metrics.jsonl") == record


def test_whole_copies_are_found_and_the_newest_of_all_nodes_is_the_last_attempt_s(store: CheckpointStore) -> None:
    truncate(commit(store, 6) / "trainer" / "__0_0.distcp")
    found = copies(store.root)
    assert [copy.manifest.step for copy in found] == [2, 4]
    later = CheckpointStore(store.root.parent / "later")
    (later.root / "checkpoints").mkdir(parents=True)
    (later.root / STAGING).touch()
    commit(later, 3, attempt=2)
    assert copies(later.root) == [], "HEAD comes last"
    later.write_head(Head("cafecafe", "aaaaaaaa", 2, None))
    best = newest([found, [], copies(later.root)])
    assert best is not None
    assert (best.manifest.attempt, best.manifest.step) == (2, 3)
    assert newest([[], []]) is None


def test_a_run_directory_is_no_copy(store: CheckpointStore) -> None:
    """Its driver may be running: what another one brought from there would be a second run."""
    (store.root / STAGING).unlink()
    assert copies(store.root) == []
    keep_only(store.commit(4))
    assert steps(store) == [2, 4]


def test_older_copies_are_deleted(store: CheckpointStore) -> None:
    keep_only(store.commit(4))
    assert steps(store) == [4]


def test_what_was_written_here_begins_the_copy(store: CheckpointStore) -> None:
    draft = store.draft(6, 1)
    (draft / "part").touch()
    adopt(draft, store.commit(6))
    adopt(draft, store.commit(8))  # this node wrote nothing of it
    assert [entry.name for entry in store.commit(6).iterdir()] == ["part"]
    assert not store.commit(8).exists()
