"""Moves parts of checkpoints between the run directory and nodes that do not see it, through object storage.

A writer on such a node writes to the usual path, on the disk of its node. When all parts of a checkpoint are written,
`put_parts` runs on each such node: it uploads the node's parts to the key that the checkpoint will have in the store,
and deletes them from the disk. The driver then downloads the files that its draft lacks. A reader on such a node
downloads the files that it needs into a temporary directory.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trireme.checkpoint.bucket import Bucket
from trireme.checkpoint.files import FileRecord, make_directory, storage_errors
from trireme.core.errors import CheckpointInvalid, TriremeError
from trireme.core.paths import path_in
from trireme.process.faults import fault_point


def sees(mark: Path, text: str) -> bool:
    """Returns True if this process sees the run directory: the file `mark` in it contains `text`, which the driver has
    written there. (A directory that an earlier driver left at this path has another text there, or no such file.)"""
    return mark.is_file() and mark.read_text() == text


def put_parts(url: str, key: str, draft: Path, files: Sequence[FileRecord]) -> str:
    """Uploads the `files` that this node has in `draft`, each to the key `key`/<path> in the store at `url`. Then
    deletes the draft from this node's disk, also after a failure. Returns the reason of a failure, else ""."""
    try:
        bucket = Bucket(url)
        for record in files:
            with suppress(FileNotFoundError), path_in(draft, record.path).open("rb") as file:
                os.unlink(file.name)  # where nodes share a disk, the node that could unlink the file puts it
                bucket.put(f"{key}/{record.path}", file)
                fault_point("parts.put")
    except (TriremeError, OSError) as error:
        return f"{os.uname().nodename}: {error}"
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return ""


@dataclass(frozen=True)
class CheckpointSource:
    """The files of a checkpoint in object storage, for processes that do not see the run directory."""

    url: str
    """Where the run is stored."""
    key: str
    """The files of the checkpoint have the keys `key`/<path>."""
    files: tuple[FileRecord, ...]
    """The files that the manifest names."""
    mark: Path
    """A file in the run directory. A process that finds `text` in it sees the run directory (`sees`)."""
    text: str
    """The contents of the file `mark`."""


@dataclass(frozen=True)
class PartReader:
    """Reads one part of a checkpoint (the directory of one room), from the run directory or from object storage."""

    directory: Path
    """The directory with the files of the part. If there is a `source`, it holds the files that were fetched."""
    source: CheckpointSource | None = None

    @classmethod
    @contextmanager
    def opened(cls, path: Path, source: CheckpointSource | None) -> Iterator[PartReader]:
        """Context manager: yields a reader of the part at `path`. If `source` is None or this process sees the run
        directory, the reader reads the files there. Otherwise the reader downloads files from `source` into a temporary
        directory next to `path.parent`, which is deleted at the end of the `with` block. Raises StorageFailed."""
        if source is None or sees(source.mark, source.text):
            yield cls(path)
            return
        # Named as a draft: should this process be killed, the next attempt deletes it (`trireme.launch.writers`).
        directory = path.parent.with_name(f"{path.parent.name}.partial-{secrets.token_hex(4)}")
        with storage_errors(directory):
            make_directory(directory)
        try:
            yield cls(path_in(directory, path.name), source)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def fetch(self, names: Iterable[str]) -> None:
        """Downloads and verifies the files `names` (relative to the part) that are not on this disk yet. Does nothing
        in a process that sees the run directory. Raises StorageFailed, and CheckpointInvalid for a file that the
        checkpoint does not have."""
        if self.source is None:
            return
        bucket = Bucket(self.source.url)
        records = {record.path: record for record in self.source.files}
        for name in names:
            path = f"{self.directory.name}/{name}"
            if path not in records:
                raise CheckpointInvalid(f"{path} is no file of the checkpoint {self.source.url}/{self.source.key}")
            if not path_in(self.directory, name).exists():
                bucket.fetch(f"{self.source.key}/{path}", self.directory.parent, records[path])

    def fetch_all(self) -> None:
        """Downloads all files of the part, as `fetch` does. Raises StorageFailed."""
        prefix = f"{self.directory.name}/"
        if self.source:
            paths = [record.path for record in self.source.files]
        else:
            paths = []
        self.fetch(path.removeprefix(prefix) for path in paths if path.startswith(prefix))
