"""Keeps model files that other nodes have sent on a disk of this node, each set of files in a directory that is named
by their digest. Moves no bytes itself, and imports no Ray."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from trireme.core.errors import DiskFull, RoomFailed, StorageFailed
from trireme.core.model_files import ModelFiles

PIECE_BYTES = 8 << 20
"""Size of one piece: large enough that a call for each costs little, small beside any object store."""
AT_ONCE = 4
"""Pieces that are on the way to one node at the same time."""
SPARE_BYTES = 64 << 20
"""Room on the disk beside the files."""
LOCK_TICK_S = 0.2
ARRIVING = ".arriving"
"""The end of the name of a directory whose files are not whole yet."""
MODEL_CACHE = "~/.cache/trireme/models"
Contents = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ModelPiece:
    """A part of a file of a model."""

    model: str
    """The name of the model, as the configuration has it."""
    file: str
    offset: int
    """Where the piece begins, in bytes."""
    size: int
    """Its bytes; 0 only in an empty file."""


Read = Callable[[ModelPiece], tuple[Contents, str]]
"""Returns the bytes of a piece, and their checksum where they were read."""


def cut(model: str, files: ModelFiles) -> Iterator[ModelPiece]:
    """Yields the pieces of all files."""
    for file, size in files.sizes.items():
        for offset in range(0, max(size, 1), PIECE_BYTES):
            yield ModelPiece(model, file, offset, min(PIECE_BYTES, size - offset))


def checksum(contents: Contents) -> str:
    """Returns the checksum of a piece."""
    return xxhash.xxh3_128_hexdigest(contents.data)


@dataclass(frozen=True)
class ModelCache:
    """The directory `root` of this node, which errors call `node`."""

    root: Path
    node: str

    def find(self, files: ModelFiles) -> Path | None:
        """Returns the directory that has these files, whole; None if there is none."""
        place = self.root / files.digest
        return place if place.is_dir() and ModelFiles.of(place) == files else None

    def bring(self, model: str, files: ModelFiles, read: Read, deadline: float) -> Path:
        """Returns the directory that has these files, which are read with `read` if they are not there. Of several
        processes of this node one reads, and the others wait for it until `deadline` (`time.monotonic`). Raises
        RoomFailed, StorageFailed."""
        if place := self.find(files):
            return place
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with self._locked(model, files, deadline):
                return self.find(files) or self._write(model, files, read, deadline)
        except OSError as error:
            reason = f"{error.strerror or error} ({error.filename or self.root})"
            raise StorageFailed(f"{self._why(model, reason)}; {self._advice()}") from error

    @contextmanager
    def _locked(self, model: str, files: ModelFiles, deadline: float) -> Iterator[None]:
        """Holds the lock of these files, in which its holder writes its process id."""
        with (self.root / f"{files.digest}.lock").open("a+") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        lock.seek(0)
                        holder = lock.read().strip() or "unknown"
                        raise RoomFailed(
                            f"node {self.node}: process {holder} there did not finish fetching the files of "
                            f"{model} in time (timeouts.start_s)"
                        ) from None
                    time.sleep(LOCK_TICK_S)
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield  # closing the file gives the lock back

    def _write(self, model: str, files: ModelFiles, read: Read, deadline: float) -> Path:
        place, draft = self.root / files.digest, self.root / f"{files.digest}{ARRIVING}"
        for left in (place, draft):  # of a process that was killed, or altered since
            shutil.rmtree(left, ignore_errors=True)
        self._refuse_unless_room(model, files)
        draft.mkdir()
        try:
            self._fill(draft, model, files, read, deadline)
            if ModelFiles.of(draft) != files:
                raise StorageFailed(self._why(model, "what was written is not what was sent; they are sent again"))
            draft.rename(place)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        _force(self.root)
        return place

    def _fill(self, draft: Path, model: str, files: ModelFiles, read: Read, deadline: float) -> None:
        """Writes all pieces at their places, some at the same time, and forces them onto the disk."""
        if wrong := [name for name in files.sizes if Path(name).name != name or name in (".", "..")]:
            raise StorageFailed(self._why(model, f"{wrong} are no names of files"))
        with ExitStack() as ending:
            opened = {name: ending.enter_context((draft / name).open("wb", buffering=0)) for name in files.sizes}
            arrived = 0

            def bring(piece: ModelPiece) -> int:
                if time.monotonic() > deadline:
                    got = f"{arrived:,} of {files.total_bytes:,} bytes came in time (timeouts.start_s)"
                    raise RoomFailed(self._why(model, got))
                contents, expected = read(piece)
                if len(contents) != piece.size or checksum(contents) != expected:
                    what = f"the {piece.size} bytes at {piece.offset} of {piece.file} were altered on the way"
                    raise StorageFailed(self._why(model, what))
                descriptor, rest, at = opened[piece.file].fileno(), contents.data, piece.offset
                while len(rest):
                    done = os.pwrite(descriptor, rest, at)
                    rest, at = rest[done:], at + done
                return piece.size

            threads = ThreadPoolExecutor(AT_ONCE, "model files")
            ending.callback(threads.shutdown, cancel_futures=True)
            for done in as_completed([threads.submit(bring, piece) for piece in cut(model, files)]):
                arrived += done.result()
            for file in opened.values():
                os.fsync(file.fileno())
        _force(draft)

    def _refuse_unless_room(self, model: str, files: ModelFiles) -> None:
        free = shutil.disk_usage(self.root).free
        if free < files.total_bytes + SPARE_BYTES:
            what = f"they have {files.total_bytes:,} bytes, and {free:,} are free in {self.root}"
            raise DiskFull(f"{self._why(model, what)}; {self._advice()}")

    def _why(self, model: str, why: str) -> str:
        return f"node {self.node} cannot get the files of {model}: {why}"

    def _advice(self) -> str:
        return (
            f"make room there (what lies in {self.root} can be deleted while no run uses it), set HOME "
            "to another directory, or copy the model to that node"
        )


def _force(directory: Path) -> None:
    """Forces the entries of a directory onto the disk. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
