"""Drafts, publication, retention and the way back; and that no crash in one of them loses a checkpoint or a row."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from checkpoint_support import (
    PARTS,
    append_rows,
    checkpoint,
    fill,
    flip,
    manifest,
    names,
    read_json_lines,
    snapshot,
    steps,
    truncate,
)

from trireme.checkpoint import manifest as manifest_module
from trireme.checkpoint.files import HashingWriter
from trireme.checkpoint.manifest import MANIFEST, CheckpointRef, Manifest
from trireme.checkpoint.rows import ROLLOUTS, ROW_FILES, recorded_steps
from trireme.checkpoint.store import HEAD, KEEP, CheckpointStore, Head
from trireme.core.errors import CheckpointInvalid, StorageFailed
from trireme.run.rollout_records import write_records

pytestmark = pytest.mark.usefixtures("instant_disk")

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FIRST = Head("cafecafe", "aaaaaaaa", 1, None)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    opened = CheckpointStore(tmp_path / "run")
    opened.root.mkdir()
    opened.write_head(FIRST)
    return opened


def rows(first: int, last: int, attempt: int = 1) -> list[dict[str, Any]]:
    return [{"step": step, "attempt": attempt} for step in range(first, last)]


def write_rows(store: CheckpointStore, first: int, last: int, attempt: int = 1) -> None:
    for name in ROW_FILES:
        append_rows(store.root / name, rows(first, last, attempt))


def a_run(store: CheckpointStore) -> None:
    """Checkpoints at 2, 4, 6 and 8, of which nothing was pruned, and rows up to 9."""
    for step in (2, 4, 6, 8):
        checkpoint(store, step)
    write_rows(store, 0, 9)


def newest_of(store: CheckpointStore) -> Path | None:
    newest, _ = store.newest()
    return newest and newest.path


def checkpoint_rows(store: CheckpointStore) -> list[str]:
    return [row["name"] for row in read_json_lines(store.rows)]


class TestHead:
    @pytest.mark.parametrize("text", ["", "{", "[]", '{"run_id": "x"}', '{"base": 3}', "null"])
    def test_damaged(self, store: CheckpointStore, text: str) -> None:
        (store.root / HEAD).write_text(text)
        with pytest.raises(CheckpointInvalid, match="is damaged"):
            store.head()
        (store.root / HEAD).unlink()
        with pytest.raises(CheckpointInvalid, match="HEAD is missing"):
            store.checkout(0)


class TestPublish:
    def test_published(self, store: CheckpointStore) -> None:
        published = checkpoint(store, 20)
        assert published == store.checkpoint(20)
        assert Manifest.verified(published).lineage == "aaaaaaaa"
        assert names(store) == ["step_000020"]
        assert store.partial() == []
        (row,) = read_json_lines(store.rows)
        assert (row.pop("name"), row.pop("path")) == ("step_000020", "checkpoints/step_000020")
        assert row == {"step": 20, "lineage": "aaaaaaaa", "identity": f"1:20:{20:032x}"}

    @pytest.mark.parametrize("part", PARTS)
    @pytest.mark.parametrize("damage", [Path.unlink, truncate, flip])
    def test_nothing_incomplete_counts(self, store: CheckpointStore, part: str, damage: Callable[[Path], None]) -> None:
        """Contents that were altered are seen if they are read."""
        draft = store.draft(20, 1)
        filled = fill(draft, manifest(20))
        damage(draft / part)
        with pytest.raises(CheckpointInvalid, match=f"{part} were altered" if damage is flip else part):
            store.publish(draft, filled, contents=damage is flip)
        assert names(store) == []

    def test_a_checkpoint_is_never_overwritten(self, store: CheckpointStore) -> None:
        before = snapshot(checkpoint(store, 20))
        draft = store.draft(20, 2)
        filled = fill(draft, manifest(20, attempt=2))
        with pytest.raises(StorageFailed, match="Directory not empty"):
            store.publish(draft, filled)
        assert snapshot(store.checkpoint(20)) == before

    def test_one_draft_per_attempt(self, store: CheckpointStore) -> None:
        store.draft(20, 1)
        with pytest.raises(StorageFailed, match=r"step_000020\.partial-1"):
            store.draft(20, 1)

    def test_no_space_for_the_manifest(self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
        checkpoint(store, 20)
        draft = store.draft(40, 1)
        filled = fill(draft, manifest(40))
        with monkeypatch.context() as patched:
            patched.setattr(HashingWriter, "write", Mock(side_effect=FULL))
            with pytest.raises(StorageFailed, match=r"manifest\.json.*MiB free"):
                store.publish(draft, filled)
        store.discard(draft)
        assert store.partial() == []
        assert newest_of(store) == store.checkpoint(20)

    def test_names_are_on_the_disk_before_it(self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """The manifest and every directory of the draft before the rename, the new name after it. (Writers force what
        they write.)"""
        draft = store.draft(20, 1)
        filled = fill(draft, manifest(20))
        forced: list[str] = []
        fsync, rename = os.fsync, os.rename

        def noted(number: int) -> None:
            forced.append(os.readlink(f"/proc/self/fd/{number}"))
            fsync(number)

        def renamed(source: Path, target: Path) -> None:
            forced.append("renamed")
            rename(source, target)

        monkeypatch.setattr(os, "fsync", noted)
        monkeypatch.setattr(os, "rename", renamed)
        store.publish(draft, filled)
        before, after = forced[: forced.index("renamed")], forced[forced.index("renamed") :]
        assert {str(draft / name) for name in ("", "trainer", "orchestrator", "inference", MANIFEST)} <= set(before)
        assert str(store.directory) in after


class TestNewest:
    @pytest.mark.parametrize("file", [*PARTS, MANIFEST])
    @pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
    def test_damaged_ones_are_skipped(self, store: CheckpointStore, file: str, damage: Callable[[Path], None]) -> None:
        checkpoint(store, 20)
        newest = checkpoint(store, 40)
        assert newest_of(store) == newest
        damage(newest / file)
        chosen, passed_over = store.newest()
        assert (chosen.path, chosen.manifest.step) == (store.checkpoint(20), 20)
        assert list(passed_over) == [newest]
        assert file in passed_over[newest]

    def test_the_clock_does_not_matter(self, store: CheckpointStore) -> None:
        """Set back between two checkpoints: the later one looks older by every time that its files have."""
        for step, time in ((20, 2_000_000_000), (40, 1_000_000_000)):
            for path in (directory := checkpoint(store, step), *directory.rglob("*")):
                os.utime(path, (time, time))
        assert newest_of(store) == store.checkpoint(40)
        store.prune(1, None)
        assert steps(store) == [40]


class TestPrune:
    def pruned(self, store: CheckpointStore, keep_last: int, keep_every: int | None = None) -> list[int]:
        before = steps(store)
        removed = store.prune(keep_last, keep_every)
        assert [int(name[5:]) for name in removed] == [step for step in before if step not in steps(store)]
        assert store.partial() == []
        return steps(store)

    def test_the_newest_some_for_good_and_what_something_else_refers_to_are_kept(self, store: CheckpointStore) -> None:
        a_run(store)
        (store.checkpoint(2) / KEEP).touch()
        assert self.pruned(store, 3) == [2, 4, 6, 8]
        assert self.pruned(store, 1, 4) == [2, 4, 8]
        assert self.pruned(store, 1) == [2, 8]
        assert checkpoint_rows(store) == ["step_000002", "step_000004", "step_000006", "step_000008"]  # they were made

    @pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
    def test_the_newest_that_verifies(self, store: CheckpointStore, damage: Callable[[Path], None]) -> None:
        a_run(store)
        for step in (6, 8):
            damage(store.checkpoint(step) / PARTS[0])
        assert 4 in self.pruned(store, 1)
        assert newest_of(store) == store.checkpoint(4)

    def test_damaged_ones_neither_count_nor_go(self, store: CheckpointStore) -> None:
        a_run(store)
        (store.checkpoint(6) / MANIFEST).unlink()
        truncate(store.checkpoint(2) / PARTS[0])
        assert self.pruned(store, 2) == [2, 4, 6, 8]
        assert self.pruned(store, 1) == [2, 6, 8]

    def test_nothing_goes_when_none_verifies(self, store: CheckpointStore) -> None:
        a_run(store)
        for path in store.checkpoints():
            flip(path / PARTS[1])
        assert self.pruned(store, 1) == [2, 4, 6, 8]

    def test_a_checkpoint_is_read_once_and_only_if_no_other_of_those_kept_was(
        self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read: list[str] = []
        real = manifest_module.checksum_of
        monkeypatch.setattr(manifest_module, "checksum_of", lambda file: read.append(file.parts[-3]) or real(file))
        for step in range(2, 16, 2):
            checkpoint(store, step)
            store.prune(3, None)
            store.prune(3, None)
        assert steps(store) == [10, 12, 14]
        assert list(dict.fromkeys(read)) == ["step_000008", "step_000014"], "before 2 and 8 went"
        assert len(read) == 2 * len(PARTS)

    def test_what_was_read_is_remembered_by_what_it_is_not_by_its_name(self, store: CheckpointStore) -> None:
        checkpoint(store, 2)
        checkpoint(store, 4)
        assert self.pruned(store, 1) == [4]
        shutil.rmtree(store.checkpoint(4))
        checkpoint(store, 3)
        flip(checkpoint(store, 4, state="another") / PARTS[0])
        assert self.pruned(store, 1) == [3, 4]

    def test_it_fails(self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
        a_run(store)
        monkeypatch.setattr(os, "rename", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
        with pytest.raises(StorageFailed, match=r"step_000002.*Read-only"):
            store.prune(1, None)


class TestCheckout:
    def test_at_the_end_nothing_changes(self, store: CheckpointStore) -> None:
        a_run(store)
        checkpoint(store, 9)
        before = snapshot(store.root)
        assert store.checkout(9) == []
        assert snapshot(store.root) == before

    def test_back_to_an_earlier_step(self, store: CheckpointStore) -> None:
        a_run(store)
        before = snapshot(store.root)
        moved = store.checkout(4)
        head = store.head()
        assert steps(store) == [2, 4]
        branch = store.branch("aaaaaaaa")
        assert sorted(path.name for path in (branch / "checkpoints").iterdir()) == ["step_000006", "step_000008"]
        for name in ROW_FILES:
            assert read_json_lines(store.root / name) == rows(0, 4)
            assert read_json_lines(branch / name) == rows(4, 9)
        assert checkpoint_rows(store) == ["step_000002", "step_000004"]
        assert [row["name"] for row in read_json_lines(branch / store.rows.name)] == ["step_000006", "step_000008"]
        assert head.base == CheckpointRef("aaaaaaaa", 4)
        assert head.lineage != "aaaaaaaa"
        assert (head.run_id, head.attempt) == ("cafecafe", 1)
        assert store.lineages() == [FIRST, head]
        assert len(moved) == 4
        for path in (branch / "checkpoints").iterdir():  # parked as they were
            was = {name: text for name, text in before.items() if path.name in name}
            assert list(snapshot(path).values()) == list(was.values())

    def test_records_of_rollouts_move_with_their_steps(self, store: CheckpointStore) -> None:
        a_run(store)
        records = store.root / ROLLOUTS
        for step in range(9):
            write_records(records, step, [f"of step {step}"])
        store.checkout(4)
        assert list(recorded_steps(store.root / ROLLOUTS)) == [0, 1, 2, 3]
        moved = recorded_steps(store.branch("aaaaaaaa") / ROLLOUTS)
        assert {step: file.read_text() for step, file in moved.items()} == {s: f"of step {s}\n" for s in range(4, 9)}

    @pytest.mark.parametrize("damage", [truncate, Path.unlink])
    def test_damaged_ones_are_parked_at_any_step(self, store: CheckpointStore, damage: Callable[[Path], None]) -> None:
        a_run(store)
        damage(store.checkpoint(2) / PARTS[2])
        store.checkout(8)
        assert steps(store) == [4, 6, 8]
        assert (store.branch("aaaaaaaa") / "checkpoints" / "step_000002").is_dir()
        assert checkpoint_rows(store) == ["step_000004", "step_000006", "step_000008"]

    def test_leftovers_go(self, store: CheckpointStore) -> None:
        checkpoint(store, 2)
        store.draft(4, 1)
        fill(store.draft(6, 1), manifest(6))
        (store.directory / "step_000001.removed").mkdir()
        (store.directory / "notes.txt").write_text("mine")
        (store.directory / "mine").mkdir()
        store.checkout(2)
        assert sorted(path.name for path in store.directory.iterdir()) == ["mine", "notes.txt", "step_000002"]

    @pytest.mark.parametrize("torn", ['{"step": 3, "rew', "\0" * 512], ids=["half a line", "zeros"])
    def test_a_torn_row_goes(self, store: CheckpointStore, torn: str) -> None:
        """Zeros are what a power failure leaves."""
        checkpoint(store, 3)
        write_rows(store, 0, 3)
        with (store.root / "metrics.jsonl").open("a") as file:
            file.write(torn)
        assert store.checkout(3) == ["1 torn lines of metrics.jsonl were dropped"]
        assert read_json_lines(store.root / "metrics.jsonl") == rows(0, 3)
        assert store.head() == FIRST

    def test_a_row_without_its_end_of_line_is_a_row(self, store: CheckpointStore) -> None:
        checkpoint(store, 2)
        write_rows(store, 0, 3)
        file = store.root / "metrics.jsonl"
        file.write_text(file.read_text().rstrip("\n"))
        store.checkout(2)
        assert read_json_lines(store.branch("aaaaaaaa") / "metrics.jsonl") == rows(2, 3)

    def test_checkpoints_without_a_row_get_one(self, store: CheckpointStore) -> None:
        a_run(store)
        lines = store.rows.read_text().splitlines(keepends=True)
        store.rows.write_text("".join(lines[:2]) + lines[3][:20])
        store.checkout(8)
        assert checkpoint_rows(store) == ["step_000002", "step_000004", "step_000006", "step_000008"]

    def test_what_is_parked_is_never_overwritten(self, store: CheckpointStore) -> None:
        a_run(store)
        parked = store.branch("aaaaaaaa") / "checkpoints" / "step_000008"
        shutil.copytree(store.checkpoint(6), parked)
        before = snapshot(parked)
        with pytest.raises(StorageFailed, match="Directory not empty"):
            store.checkout(4)
        assert snapshot(parked) == before
        assert newest_of(store) == store.checkpoint(8)
