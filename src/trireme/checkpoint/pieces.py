"""Files of a commit on their way from one machine to another: cut into pieces, put together, verified. Moves no bytes.

A file counts as arrived once its size and checksum are those that its writer returned; until then it has another name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from trireme.checkpoint.files import (
    Bytes,
    FileRecord,
    HashingWriter,
    checksum_of,
    fsync_directory,
    make_directory,
    storage_errors,
)
from trireme.checkpoint.manifest import file_of
from trireme.core.errors import CheckpointInvalid, StorageFailed
from trireme.process.faults import fault_point

PIECE_BYTES = 8 << 20
"""Size of one piece: large enough that a call for each costs little, small beside any object store."""
WINDOW = 4
"""Pieces on the way at once: one is read and one is written while two travel."""
UNFINISHED = ".arriving"
"""The end of the name of a file that is not whole yet."""
Reference = TypeVar("Reference")


@dataclass(frozen=True)
class Piece:
    """A part of a file."""

    record: FileRecord
    """The whole file."""
    offset: int
    """Where the piece begins, in bytes."""
    size: int
    """Bytes of the piece; 0 only in an empty file."""

    @property
    def is_last(self) -> bool:
        """True for the piece that ends its file."""
        return self.offset + self.size == self.record.size


def cut(files: Iterable[FileRecord], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Yields the pieces of `files`, file after file and each in order."""
    for record in files:
        for offset in range(0, max(record.size, 1), piece_bytes):
            yield Piece(record, offset, min(piece_bytes, record.size - offset))


def flow(
    pieces: Iterable[Piece],
    send: Callable[[Piece], Reference],
    arrived: Callable[[Piece, Reference], None],
    window: int = WINDOW,
) -> None:
    """Calls `send` with each piece, and `arrived` in the same order with what it returned, at most `window` pieces
    later. So no more than `window` pieces are on the way."""
    sent: deque[tuple[Piece, Reference]] = deque()
    for piece in pieces:
        if len(sent) == window:
            arrived(*sent.popleft())
        sent.append((piece, send(piece)))
    while sent:
        arrived(*sent.popleft())


def read_piece(commit: Path, piece: Piece) -> Bytes:
    """Reads a piece of a file in directory `commit`. Raises StorageFailed if the file cannot be read or is shorter."""
    fault = fault_point("pieces.read")
    try:
        contents = np.fromfile(_place(commit, piece.record), np.uint8, piece.size, offset=piece.offset)
    except OSError as error:
        raise StorageFailed(f"cannot read {commit / piece.record.path}: {error.strerror or error}") from None
    if fault == "tear":
        contents = contents[:-1]
    elif fault == "corrupt":
        contents[-1] ^= 1
    return contents


def held(commit: Path, files: Iterable[FileRecord], contents: bool = False) -> list[FileRecord]:
    """Returns those of `files` that lie in directory `commit` with their size and, with `contents`, their checksum."""
    return [record for record in files if _is_held(_place(commit, record), record, contents)]


def _is_held(file: Path, record: FileRecord, contents: bool) -> bool:
    with suppress(OSError):
        return file.stat().st_size == record.size and (not contents or checksum_of(file) == record.checksum)
    return False


def _place(commit: Path, record: FileRecord) -> Path:
    """Returns the place of a file. Raises StorageFailed for one outside of `commit`."""
    try:
        return file_of(commit, record)
    except CheckpointInvalid as error:
        raise StorageFailed(f"{commit}: {error}") from None


class Assembly:
    """Puts the pieces of files together in directory `commit`; they must come file after file and each in order.

    A file is on the disk, verified and under its own name when its last piece has been taken. After an error nothing is
    left of the file that was arriving, and the next one begins anew.
    """

    def __init__(self, commit: Path) -> None:
        self._commit = commit
        self._writer: HashingWriter | None = None
        self._expected: Piece | None = None
        """The file that is arriving, and what has arrived of it, as one piece."""

    def take(self, piece: Piece, contents: Bytes) -> None:
        """Takes the next piece. Raises StorageFailed for one that is torn or out of order, a wrong checksum, and what
        cannot be written."""
        file = _place(self._commit, piece.record)
        try:
            with storage_errors(file):
                self._append(file, piece, contents)
                if piece.is_last:
                    self._finish(file, piece.record)
        except BaseException:
            self.abandon()
            raise

    def _append(self, file: Path, piece: Piece, contents: Bytes) -> None:
        record = piece.record
        if piece.offset == 0:
            self.abandon()
            make_directory(file.parent)
            self._writer = HashingWriter(_unfinished(file), large=record.size > PIECE_BYTES)
            self._expected = Piece(record, 0, 0)
        arrived = self._expected
        if self._writer is None or arrived is None or (arrived.record, arrived.size) != (record, piece.offset):
            raise StorageFailed(f"{file}: the piece at {piece.offset} arrived out of order; the file is sent again")
        if len(contents) != piece.size:
            raise StorageFailed(
                f"{file}: {len(contents)} bytes arrived of a piece with {piece.size}; its writer said {record.size} "
                "bytes for the file"
            )
        fault_point("pieces.write")
        self._writer.write(contents.data)
        self._expected = Piece(record, 0, piece.offset + piece.size)

    def _finish(self, file: Path, record: FileRecord) -> None:
        assert self._writer is not None
        self._writer.close()
        written = self._writer.record(record.path)
        if written != record:
            raise StorageFailed(
                f"{file} arrived with checksum {written.checksum}, it was written with {record.checksum}: it was "
                "altered on the disk that it was read from, or on the way"
            )
        _unfinished(file).replace(file)
        fsync_directory(file.parent)
        self._writer = self._expected = None

    def abandon(self) -> None:
        """Deletes what has arrived of an unfinished file."""
        writer, arrived, self._writer, self._expected = self._writer, self._expected, None, None
        if writer and arrived:
            with suppress(OSError):
                writer.close()
            with suppress(OSError):
                _unfinished(self._commit / arrived.record.path).unlink()


def _unfinished(file: Path) -> Path:
    return file.with_name(file.name + UNFINISHED)


def of_rooms(files: Iterable[FileRecord], rooms: Sequence[str]) -> list[FileRecord]:
    """Returns the files of the parts of `rooms`: each room's lie in a directory of its name."""
    return [record for record in files if record.path.split("/")[0] in rooms]
