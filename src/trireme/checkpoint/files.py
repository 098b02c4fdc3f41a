"""Writing files of a checkpoint: every one is hashed on its way to the disk and forced onto it before it counts.

The checksum is xxh3-128 of the bytes that were handed over, not of what could be read back: a disk that returns
something else is noticed by `trireme.checkpoint.manifest.verify`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from trireme.errors import StorageFailed

Chunk = bytes | bytearray | memoryview
READ_BYTES = 4 << 20


@dataclass(frozen=True, order=True)
class FileRecord:
    """One file of a commit: `path` relative to the commit, with slashes; `size` in bytes; `checksum` xxh3-128, 32 hex
    digits."""

    path: str
    size: int
    checksum: str


def _free_space(path: Path) -> str:
    """The space that is free where `path` lies, or would lie."""
    there = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    return f"{shutil.disk_usage(there).free / 2**20:,.1f} MiB free"


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into StorageFailed, which names `path` and the space that is free there."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"cannot write {path}: {error.strerror or error} ({_free_space(path)}); "
            "make room there, or correct its permissions"
        ) from error


def fsync_directory(path: Path) -> None:
    """Forces the names in directory `path` onto the disk. Raises OSError."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def make_directory(path: Path) -> None:
    """Makes directory `path` and what is missing above it, names forced onto the disk. Raises OSError."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        fsync_directory(path.parent)


class HashingWriter:
    """A new binary file that hashes what is written through it, in order; it cannot seek.

    An existing file of that name is replaced. All methods raise OSError as files do (see `storage_errors`). As a
    context manager it closes at the end of the block; when the block raises, without forcing anything onto the disk,
    and raises the OSError of a failed write again where something else hides it (torch.save ends a file that it could
    not write by complaining of its length).
    """

    def __init__(self, file: Path) -> None:
        self._file: IO[bytes] = file.open("wb", buffering=0)
        self._hash = xxhash.xxh3_128()
        self._size = 0
        self._failure: OSError | None = None

    def write(self, chunk: Chunk) -> int:
        """Writes all of `chunk` (any contiguous buffer); returns its size in bytes."""
        rest = memoryview(chunk).cast("B")
        size = len(rest)
        self._hash.update(rest)
        self._size += size
        try:
            while len(rest):
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._failure = error
            raise
        return size

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Nothing is held back: every write goes to the operating system at once."""

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Forces the contents onto the disk and closes the file; a second call does nothing."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def record(self, path: str) -> FileRecord:
        """What was written so far, under the name `path` (relative to the commit)."""
        return FileRecord(path, self._size, self._hash.hexdigest())

    def __enter__(self) -> HashingWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
        if self._failure:
            raise self._failure


def write_bytes(directory: Path, name: str, *chunks: Chunk) -> FileRecord:
    """Writes `chunks`, one after the other, to file `name` in `directory`, which is made if need be; on the disk when
    it returns. The record's path is relative to the parent of `directory`. Raises StorageFailed."""
    file = directory / name
    with storage_errors(file):
        make_directory(file.parent)
        with HashingWriter(file) as writer:
            for chunk in chunks:
                writer.write(chunk)
        fsync_directory(file.parent)
    return writer.record(f"{directory.name}/{name}")


def replace_file(file: Path, contents: bytes) -> None:
    """Gives `file` new `contents`: whoever reads it, also after a crash, finds the old ones or the new ones, whole.

    Raises OSError.
    """
    new = file.with_name(f"{file.name}.new")
    with HashingWriter(new) as writer:
        writer.write(contents)
    new.replace(file)
    fsync_directory(file.parent)


def checksum_of(file: Path) -> str:
    """xxh3-128 of a file's contents as they are on the disk now, 32 hex digits. Raises OSError."""
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        buffer = memoryview(bytearray(READ_BYTES))
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
