"""The copy of a commit on another node, at the path of the run directory: its files, and which copies there are.

A copy is a small run directory with the mark STAGING: the commit, with its manifest last, and the files beside it that
a resume needs. A driver on that node resumes from it as from its own; one elsewhere brings it to its own disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from trireme.checkpoint.files import BLOCK_BYTES, FileRecord, fsync_directory
from trireme.checkpoint.manifest import MANIFEST, Manifest
from trireme.checkpoint.rows import ROW_FILES
from trireme.checkpoint.store import HEAD, STAGING, CheckpointStore
from trireme.config.trust import RECORD
from trireme.core.errors import CheckpointInvalid


@dataclass(frozen=True)
class CommitCopy:
    """A copy of a commit on some node."""

    manifest: Manifest
    """The manifest of the commit."""
    beside: tuple[FileRecord, ...]
    """The files beside it, relative to the run directory."""
    run_id: str
    """The id of the run, by its HEAD."""

    @property
    def age(self) -> tuple[int, int]:
        """Orders copies: a later attempt made the newer commit, and in an attempt a later step is newer."""
        return self.manifest.attempt, self.manifest.step


def beside(root: Path) -> list[FileRecord]:
    """Returns the files that a resume needs beside those of the commit, relative to the run directory `root`, HEAD
    last. Rows may grow meanwhile; what they have now counts. Raises OSError."""
    names = (RECORD, *ROW_FILES, CheckpointStore(root).rows.name, HEAD)
    return [record_of(root, name) for name in names if (root / name).is_file()]


def record_of(root: Path, name: str) -> FileRecord:
    """Returns the record of a file below `root`, as it is now. Raises OSError."""
    left = size = (root / name).stat().st_size
    checksum = xxhash.xxh3_128()
    with (root / name).open("rb") as stream:
        while left and (block := stream.read(min(left, BLOCK_BYTES))):
            checksum.update(block)
            left -= len(block)
    return FileRecord(name, size - left, checksum.hexdigest())


def adopt(draft: Path, commit: Path) -> None:
    """Makes the files of a sealed draft that were written on this node a beginning of the copy. Raises OSError."""
    shutil.rmtree(commit, ignore_errors=True)
    with suppress(FileNotFoundError):
        draft.rename(commit)
        fsync_directory(commit.parent)


def keep_only(commit: Path) -> None:
    """Deletes all copies on this node but that of `commit`. Raises OSError."""
    if (commit.parents[1] / STAGING).exists():
        for other in CheckpointStore(commit.parents[1]).commits():
            if other != commit:
                (other / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(other)


def copies(root: Path) -> list[CommitCopy]:
    """Returns the copies in `root`, if it has the mark of such a directory: those whose files have their sizes."""
    found: list[CommitCopy] = []
    store = CheckpointStore(root)
    for commit in store.commits() if (root / STAGING).exists() else ():
        with suppress(CheckpointInvalid):
            manifest = Manifest.verified(commit, contents=False)
            if head := store.head():
                found.append(CommitCopy(manifest, tuple(beside(root)), head.run_id))
    return found


def delete_halves(root: Path) -> None:
    """Deletes commits of which only a part was brought to `root`, if it has the mark of such a directory. Raises
    OSError."""
    if (root / STAGING).exists():
        for commit in CheckpointStore(root).commits():
            if not (commit / MANIFEST).exists():
                shutil.rmtree(commit)


def newest(held: Iterable[Sequence[CommitCopy]]) -> CommitCopy | None:
    """Returns the newest of the copies that several nodes hold; None if there is none."""
    return max((copy for copies in held for copy in copies), key=lambda copy: copy.age, default=None)
