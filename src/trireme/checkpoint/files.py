"""Writes the files of a checkpoint. Each is hashed while it is written, and forced onto the disk before it counts.

The checksum is xxh3-128 of the bytes handed to the writer, not of bytes read back, so `Manifest.verified` notices a
disk that returns something else.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import xxhash

from trireme.core.errors import DiskFull, StorageFailed
from trireme.core.paths import path_in

Chunk = bytes | bytearray | memoryview
Bytes = npt.NDArray[np.uint8]
Copy = Callable[[Bytes, Bytes], None]
BLOCK_BYTES = 1 << 20
"""Size of one write: a multiple of every file system's alignment, small enough to stay in a core's cache."""
HUGE_PAGE = 1 << 21
CACHED_BYTES = 1 << 19
"""Number of bytes that are copied into a block and hashed there before the next bytes are copied: they are still in the
core's cache when they are hashed. This takes three fifths of the time for copying and hashing whole blocks."""
BLOCKS = 4
"""Blocks of a large file that are written at the same time: a disk that gets one after the other stands still while the
next one fills."""
WORTH_A_THREAD = 1 << 16
"""Another thread copies and hashes chunks of at least this many bytes. For fewer bytes the handing over takes longer
than the work itself."""


@dataclass(frozen=True, order=True)
class FileRecord:
    """Path, size and checksum of one file of a checkpoint."""

    path: str  # relative to the checkpoint, with slashes
    size: int  # bytes
    checksum: str  # xxh3-128, 32 hex digits


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Context manager: turns an OSError in its `with` block into StorageFailed, or into DiskFull if there was no space.
    The message names `path` and the free space there."""
    try:
        yield
    except OSError as error:
        existing = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
        free = f"{shutil.disk_usage(existing).free / 2**20:,.1f} MiB free"
        failed = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageFailed
        raise failed(
            f"cannot write {path}: {error.strerror or error} ({free}); make room there, or correct its permissions"
        ) from error


def fsync_directory(path: Path) -> None:
    """Forces the entries of directory `path` onto the disk. Raises OSError."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def make_directory(path: Path) -> None:
    """Makes directory `path` and its missing parents, and forces them onto the disk. Raises OSError."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        fsync_directory(path.parent)


def _set_direct(file: int, direct: bool) -> bool:
    """Turns O_DIRECT (writes without the page cache) on or off for the descriptor `file`. Returns False if the file
    system does not support that."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def huge_pages(nbytes: int) -> memoryview:
    """Allocates `nbytes` of memory in huge pages, or in ordinary ones if the kernel has no huge pages. Physical memory
    is taken only when a page is first written."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE
    return memoryview(memory)[start : start + nbytes]


class HashingWriter:
    """Writes a new binary file and hashes its bytes in order; it cannot seek. Replaces an existing file of that name.

    Bytes are collected in blocks. Full blocks bypass the page cache (O_DIRECT): this takes a tenth of the CPU time. The
    last block is written through the cache, and so is every block if the file system refuses O_DIRECT.

    All methods raise OSError as files do (see `storage_errors`). Used as a context manager, it closes the file at the
    end of the `with` block. If the `with` block raises, nothing is forced onto the disk. If a write has failed, its
    OSError is raised again at the end, because another error may hide it (torch.save reports a wrong length instead).

    `thread`: an executor in which large chunks are copied and hashed, almost without the GIL, while `write` waits.
    `copy(to, from)` copies bytes into a block. Threads write full blocks while the next block fills. The blocks lie in
    huge pages: a block is then contiguous in physical memory, and is written with one request to the disk. In ordinary
    pages it takes two requests, because the usual device takes at most 254 pages per request.
    """

    def __init__(self, file: Path, thread: Executor | None = None, copy: Copy = np.copyto) -> None:
        self._thread = thread
        self._copy = copy
        self._file: IO[bytes] = file.open("wb", buffering=0)
        self._blocks = np.frombuffer(huge_pages(BLOCKS * BLOCK_BYTES), np.uint8).reshape(BLOCKS, BLOCK_BYTES)
        self._writers: ThreadPoolExecutor | None = None
        self._writing: deque[Future[None]] = deque()
        self._full = 0  # blocks that were handed over
        self._filled = 0
        self._direct = False
        self._hash = xxhash.xxh3_128()
        self._size = 0
        self._failure: OSError | None = None

    def write(self, chunk: Chunk) -> int:
        """Writes all of `chunk` (any contiguous buffer). Returns its size in bytes."""
        rest = memoryview(chunk).cast("B")
        if self._thread and len(rest) >= WORTH_A_THREAD:
            self._thread.submit(self._take, rest).result()
        else:
            self._take(rest)
        return len(rest)

    def _take(self, rest: memoryview) -> None:
        source = np.frombuffer(rest, np.uint8)
        while len(source):
            part = source[: min(CACHED_BYTES, BLOCK_BYTES - self._filled)]
            block = self._blocks[self._full % BLOCKS]
            taken = block[self._filled : self._filled + len(part)]
            self._copy(taken, part)
            self._hash.update(taken.data)
            self._filled += len(part)
            self._size += len(part)
            source = source[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._hand_over()

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Does nothing: a block that is not full waits for more bytes or for `close`."""

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Forces the contents onto the disk and closes the file. A second call does nothing."""
        if self._file.closed:
            return
        try:
            if self._thread:
                self._thread.submit(self._finish).result()
            else:
                self._finish()
        finally:
            self._end_writers()
            self._file.close()

    def _finish(self) -> None:
        """Waits for the blocks that are being written, writes the last block, which is not full, and forces the file
        onto the disk."""
        while self._writing:
            self._writing.popleft().result()
        _set_direct(self.fileno(), False)
        self._direct = False
        self._write(self._blocks[self._full % BLOCKS][: self._filled], self._full * BLOCK_BYTES)
        os.fsync(self.fileno())

    def _end_writers(self) -> None:
        if self._writers:
            self._writers.shutdown()

    def _hand_over(self) -> None:
        """Writes the full block to the file in a thread, and continues with the next block."""
        if not self._full:
            self._direct = _set_direct(self.fileno(), True)
        at = self._full * BLOCK_BYTES
        block = self._blocks[self._full % BLOCKS]
        self._full += 1
        self._filled = 0
        # They are started here, so they have the priority of the thread that hashes.
        self._writers = self._writers or ThreadPoolExecutor(BLOCKS, "write")
        self._writing.append(self._writers.submit(self._write, block, at))
        if len(self._writing) == BLOCKS:
            self._writing.popleft().result()

    def _write(self, block: Bytes, at: int) -> None:
        """Writes all bytes of `block` to the file at the offset `at`, in bytes. If the file system refuses
        O_DIRECT, continues without it."""
        while len(block):
            direct = self._direct
            try:
                written = os.pwrite(self.fileno(), block.data, at)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    self._failure = error
                    raise
                # O_DIRECT is refused only now, also for its alignment after a short write. The file is changed before
                # `_direct`: else a thread reads False, still writes with O_DIRECT, and takes the refusal for a failure.
                _set_direct(self.fileno(), False)
                self._direct = False
            else:
                block = block[written:]
                at += written

    def record(self, path: str) -> FileRecord:
        """Returns the record of the bytes written so far, under the name `path` (relative to the checkpoint)."""
        return FileRecord(path, self._size, self._hash.hexdigest())

    def __enter__(self) -> HashingWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end_writers()
            self._file.close()
        if self._failure:
            raise self._failure


def write_bytes(directory: Path, name: str, *chunks: Chunk) -> FileRecord:
    """Writes `chunks` in order to the file `name` in `directory`, and forces the file onto the disk. Makes `directory`
    if it is missing. Returns the file's record, with a path relative to the parent of `directory`. Raises
    StorageFailed."""
    file = path_in(directory, name)
    with storage_errors(file):
        make_directory(file.parent)
        with HashingWriter(file) as writer:
            for chunk in chunks:
                writer.write(chunk)
        fsync_directory(file.parent)
    return writer.record(f"{directory.name}/{name}")


def replace_file(file: Path, contents: bytes) -> None:
    """Replaces the contents of `file` atomically: a reader, also after a crash, gets either all of the old contents or
    all of the new ones. Raises OSError."""
    new = file.with_name(f"{file.name}.new")
    with HashingWriter(new) as writer:
        writer.write(contents)
    new.replace(file)
    fsync_directory(file.parent)


def checksum_of(file: Path) -> str:
    """Computes the xxh3-128 (32 hex digits) of a file's present contents on the disk. Raises OSError."""
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
