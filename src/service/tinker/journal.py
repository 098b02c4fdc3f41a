"""The journal of a Tinker server: every record is in a file before a client is told of what it says.

    journal/000003.log    frame | frame | frame | fra     the only file that counts; its last frame is torn

A record is handed to the operating
system by one `write`, and survives the death of this process, whatever killed it. It is not forced onto the disk at
each request, which would cost milliseconds: only a file that is begun is. So a file names the boot of the machine
that wrote it. Where the machine was started again since, the last records may be missing, which `replay` tells.

A file is not continued by another one but replaced: a new one says in few records what the old one said in many, and is
forced onto the disk before the old one is removed. This happens at each start, and when a file has become large, as
then most of it tells of what was done and fetched long ago.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from service.store import BOOT
from service.tinker.frames import framed, frames, is_interrupted, write_frame
from service.tinker.records import Record, decode, encode
from trireme.checkpoint.files import fsync_directory, make_directory, storage_errors
from trireme.core.errors import StorageFailed
from trireme.core.finite_json import to_json
from trireme.process.faults import fault_point

FORMAT = 3
FULL = 256 << 20
"""Bytes of a file that is worth replacing, if it is also twice as large as it was at its beginning."""
NEW = ".new"
"""Ends the name of a file that is being begun."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replayed:
    """The contents of a journal."""

    records: list[Record]
    lost: bool
    """Records may be missing at the end, although clients may have been told of them."""


class TinkerJournal:
    """The journal in `directory`: first `replay`, then `begin`, then `append`. `boot`: the name of the machine's start,
    by default the true one. `full`: the size of a file that is worth replacing, in bytes."""

    def __init__(self, directory: Path, boot: str | None = None, full: int = FULL) -> None:
        self._directory, self._boot, self._full = directory, boot or BOOT.read_text().strip(), full
        self._file: int | None = None
        self._path = directory
        self._size = self._first_size = 0

    def replay(self) -> Replayed:
        """Returns what the newest file says. Raises StorageFailed, also for a file of another format."""
        paths = self._paths()
        if not paths:
            return Replayed([], lost=False)
        with storage_errors(paths[-1]):
            contents = paths[-1].read_bytes()
        payloads = list(frames(contents))
        if not payloads:
            raise StorageFailed(f"{paths[-1]} is damaged at its beginning; move it elsewhere to begin without it")
        head = json.loads(payloads[0][0])
        if head["format"] != FORMAT:
            raise StorageFailed(
                f"{paths[-1]} has the format {head['format']}; expected {FORMAT}: start the version of the server "
                "that wrote it, or move the file elsewhere, which ends all sessions (saved states stay)"
            )
        torn = contents[payloads[-1][1] :]
        lost = head["boot"] != self._boot or not is_interrupted(torn)
        if lost:
            log.warning("the journal %s may lack its last records", paths[-1])
        return Replayed([decode(payload) for payload, _ in payloads[1:]], lost)

    def begin(self, records: Iterable[Record]) -> None:
        """Begins a file that says `records`, in place of all others. Raises StorageFailed; the journal is then as
        before."""
        paths = self._paths() if self._directory.is_dir() else []
        path = self._directory / f"{int(paths[-1].stem) + 1 if paths else 0:06d}.log"
        new = path.with_suffix(NEW)
        head = framed(to_json({"format": FORMAT, "boot": self._boot}).encode())
        with storage_errors(path):
            make_directory(self._directory)
            file = os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
            try:
                size = 0
                for frame in (head, *(framed(encode(record)) for record in records)):
                    write_frame(file, frame)
                    size += len(frame)
                os.fsync(file)
                new.rename(path)
                fsync_directory(self._directory)
            except OSError:
                os.close(file)
                new.unlink(missing_ok=True)
                raise
        fault_point("tinker.journal.begun")
        if self._file is not None:
            os.close(self._file)
        self._file, self._path, self._size, self._first_size = file, path, size, size
        for old in paths:
            old.unlink(missing_ok=True)

    def append(self, record: Record) -> None:
        """Writes a record. Raises StorageFailed; the journal is then as before."""
        if self._file is None:
            raise StorageFailed(f"the journal {self._directory} is closed, or a failed write could not be taken back")
        frame = framed(encode(record))
        try:
            with storage_errors(self._path):
                write_frame(self._file, frame)
        except StorageFailed:
            self._take_back(self._file)
            raise
        self._size += len(frame)

    @property
    def is_full(self) -> bool:
        """True: it is time to begin another file."""
        return self._size > max(self._full, 2 * self._first_size)

    def close(self) -> None:
        """Forces the file onto the disk and closes it. A second call does nothing. Raises StorageFailed."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            with storage_errors(self._path):
                os.fsync(file)
        finally:
            os.close(file)

    def _paths(self) -> list[Path]:
        return sorted(self._directory.glob("*.log"))

    def _take_back(self, file: int) -> None:
        """Cuts off what a failed write has left. Where even that fails, nothing more may be written behind it."""
        try:
            os.ftruncate(file, self._size)
        except OSError:
            os.close(file)
            self._file = None
