"""The files of one node below a run directory that the node does not share with the driver.

The node has the same path on a disk of its own. Actors there write to it as if it were the run directory, and a Ray
actor of this module gives what they wrote to the driver, and takes what they need to read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from trireme.checkpoint.copies import adopt, keep_only
from trireme.checkpoint.files import Bytes, FileRecord, storage_errors
from trireme.checkpoint.manifest import MANIFEST
from trireme.checkpoint.pieces import WINDOW, Assembly, Piece, held, read_piece
from trireme.checkpoint.store import HEAD, STAGING, CheckpointStore
from trireme.core.errors import StorageFailed
from trireme.process.environ import view_of
from trireme.run.tails import GrownFile, grown

NICE = 10
"""A nice value with which a process gets a tenth of the CPU time that training on its core gets."""
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that take the memory which training needs."""


@dataclass(frozen=True)
class NodeView:
    """The answer of one node to the question whether it sees the run directory."""

    host: str
    """Its name."""
    sees: bool
    """True: it sees what the driver has written there."""
    unfit: str = ""
    """Why the same path cannot hold files there until they are gathered; empty if it can."""


def look(nonce: Path, contents: str, root: Path) -> NodeView:
    """Looks for the file `nonce` with `contents`, which the driver has written below its run directory `root`. Where it
    is not seen, prepares the same path for staging."""
    host, seen = view_of(nonce)
    return NodeView(host, True) if seen == contents else NodeView(host, False, prepare(root, _session()))


def prepare(root: Path, session: Path | None) -> str:
    """Makes directory `root` for files that are gathered elsewhere, marks it as such, and deletes the drafts that an
    earlier attempt left there. Returns why that cannot be; empty if it is done. `session`: Ray's directory here."""
    mark = root / STAGING
    if session and session in root.parents:
        return f"it lies in Ray's directory {session}, which Ray deletes"
    if (root / HEAD).exists() and not mark.exists():
        return "another run has its run directory there"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if (kind := _file_system(root)) in IN_MEMORY:
            return f"it is kept in memory ({kind})"
        with mark.open("w") as file:
            file.write("The driver of this run is on another node, and gathers what is written here.\n")
            os.fsync(file.fileno())
        for draft in CheckpointStore(root).partial():
            shutil.rmtree(draft)
    except OSError as error:
        return f"{error.strerror or error} ({error.filename or root})"
    return ""


def _session() -> Path | None:
    node = ray._private.worker.global_worker.node
    return Path(node.get_session_dir_path()).parent if node else None


def _file_system(path: Path) -> str:
    """Returns the kind of file system that holds `path`."""
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((mounts[each] for each in (path.resolve(), *path.resolve().parents) if each in mounts), "")


def _check_staging(directory: Path) -> None:
    """Raises StorageFailed if `directory`, a run directory's path or a commit below it, is no place for staging: a
    driver may have started here, whose run directory it is then."""
    if not any((place / STAGING).exists() for place in (directory, directory.parents[1])):
        raise StorageFailed(f"{directory} on this node is no place for staging any more: another driver may have it")


class NodeFiles:
    """The files of commits on one node, for the driver. Paths are the driver's."""

    def __init__(self) -> None:
        os.nice(NICE)
        self._assemblies: dict[Path, Assembly] = {}

    def look(self, nonce: Path, contents: str, root: Path) -> NodeView:
        return look(nonce, contents, root)

    def held(self, commit: Path, files: Sequence[FileRecord], contents: bool) -> list[FileRecord]:
        return held(commit, files, contents)

    @ray.method(concurrency_group="read")
    def read(self, commit: Path, piece: Piece) -> Bytes:
        return read_piece(commit, piece)

    @ray.method(concurrency_group="read")
    def grown(self, root: Path, known: Mapping[str, int], first_attempt: int) -> list[GrownFile]:
        return grown(root, known, first_attempt)

    def take(self, commit: Path, piece: Piece, contents: Bytes) -> None:
        """Takes a piece of a file in `commit`, or in the run directory itself. Raises StorageFailed."""
        _check_staging(commit)
        if piece.offset == 0:
            (commit / MANIFEST).unlink(missing_ok=True)  # another file than the manifest names: it is no copy any more
        self._assemblies.setdefault(commit, Assembly(commit)).take(piece, contents)

    def adopt(self, draft: Path, commit: Path) -> None:
        """Makes what was staged of `draft` a beginning of the copy `commit`. Raises StorageFailed."""
        _check_staging(commit)
        with storage_errors(commit):
            adopt(draft, commit)

    def keep_only(self, commit: Path) -> None:
        self._assemblies.clear()
        with storage_errors(commit):
            keep_only(commit)

    def remove(self, commit: Path) -> None:
        """Deletes a draft, or what was brought of a commit, if this is a place for staging. A copy stays."""
        self._assemblies.pop(commit, None)
        if (commit.parents[1] / STAGING).exists() and not (commit / MANIFEST).exists():
            with suppress(FileNotFoundError):
                shutil.rmtree(commit)


NodeFilesActor = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"read": WINDOW})(NodeFiles)
