"""The journal of sessions: every record is in a file before anybody is told of what it says.

    journal/000000.log    frame | frame | frame | ...     a frame: length, its check, checksum, record
    journal/000001.log    frame | frame | fra             the newest file; its last frame is torn

A record is handed to the operating system by one `write` before the answer that it holds is sent. From then on it
survives the death of this process, whatever killed it. It is not forced onto the disk: agents give up within seconds
when the service does not answer, so that no session survives the restart of a machine, and forcing costs milliseconds
for each turn (some 3 ms, against 25 microseconds). So each file names the boot of the machine that wrote it:
where the machine was started again behind a file, its last records may be missing, and `RecordsLost` stands in their
place.

A frame that ends early is one whose `write` was interrupted: no caller was told of it, and it is cut off. Damage of any
other kind is no such interruption: `RecordsLost` stands for it too, and files behind it are set aside as `*.damaged`.

A new file is begun when one is full. Files are removed from the oldest on, when all their sessions are forgotten.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from service.sessions.records import RecordsLost, SessionForgotten, SessionOpened, SessionRecord, decode, encode
from trireme.checkpoint.files import fsync_directory, make_directory, storage_errors
from trireme.core.errors import StorageFailed
from trireme.core.finite_json import to_json

LENGTH = struct.Struct("<I")
FRAME = struct.Struct("<IIQ")
"""The length of a payload, the xxh32 of these four bytes, and the payload's xxh3-64. A wrong length would read as a
frame that was interrupted."""
FORMAT = 1
FULL = 64 << 20
"""Bytes after which a new file is begun."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Linux names each start of a machine here."""
log = logging.getLogger(__name__)


Replayed = list[SessionRecord | RecordsLost]


@dataclass(frozen=True)
class _JournalFile:
    """The contents of one file."""

    path: Path
    head: Mapping[str, Any]
    """Empty where the file was only being begun."""
    records: list[SessionRecord]
    end: int
    """Where its last whole frame ends."""
    intact: bool
    """Nothing but an interrupted frame follows that."""


def framed(payload: bytes) -> bytes:
    """Returns a payload as a frame."""
    length = len(payload)
    return FRAME.pack(length, _check(length), xxhash.xxh3_64_intdigest(payload)) + payload


def frames(contents: bytes) -> Iterator[tuple[bytes, int]]:
    """Yields each payload with the place behind its frame, up to the first frame that is not whole."""
    place = 0
    while place + FRAME.size <= len(contents):
        length, check, checksum = FRAME.unpack_from(contents, place)
        payload = contents[place + FRAME.size : place + FRAME.size + length]
        if check != _check(length) or len(payload) < length or xxhash.xxh3_64_intdigest(payload) != checksum:
            return
        place += FRAME.size + length
        yield payload, place


def is_interrupted(rest: bytes) -> bool:
    """Returns True if what follows the last whole frame is the beginning of a frame, or nothing."""
    if len(rest) < FRAME.size:
        return True
    length, check, _ = FRAME.unpack_from(rest)
    return check == _check(length) and len(rest) - FRAME.size < length


def write_frame(file: int, frame: bytes) -> None:
    """Writes a frame whole. Raises OSError."""
    written = os.write(file, frame)
    while written < len(frame):
        written += os.write(file, frame[written:])


def _check(length: int) -> int:
    return xxhash.xxh32_intdigest(LENGTH.pack(length))


class SessionJournal:
    """Appends to the files in `directory`, after those that are there: `replay` first, and once. `boot`: the name of
    the machine's start, by default the true one."""

    def __init__(self, directory: Path, boot: str | None = None, full: int = FULL) -> None:
        self._directory, self._boot, self._full = directory, boot or BOOT.read_text().strip(), full
        self._sessions: dict[Path, set[str]] = {}
        self._current: Path | None = None
        self._file = -1
        self._size = 0

    def replay(self) -> Replayed:
        """Returns the records that are there, and begins a file of its own behind them. Raises StorageFailed."""
        with storage_errors(self._directory):
            make_directory(self._directory)
            paths = sorted(self._directory.glob("*.log"))
        files: list[_JournalFile] = []
        for path in paths:
            files.append(_read(path, last=path == paths[-1]))
            if not files[-1].intact:
                break
        whole = not files or files[-1].intact
        self._begin(int(paths[-1].stem) + 1 if paths else 0, whole)
        with storage_errors(self._directory):
            for path in paths[len(files) :]:
                path.rename(path.with_suffix(".damaged"))
            if files:
                os.truncate(files[-1].path, files[-1].end)
        told = [file for file in files if file.head]
        heads = [*(file.head for file in told), {"boot": self._boot, "whole": whole}]
        replayed: Replayed = []
        for file, (head, following) in zip(told, pairwise(heads), strict=True):
            replayed += file.records
            if head["boot"] != following["boot"] or not following["whole"]:
                replayed.append(RecordsLost())
        self._take_note(files)
        return list(_with_beginnings(replayed))

    def _take_note(self, files: Sequence[_JournalFile]) -> None:
        """Remembers which file tells of which session, and removes those that are done."""
        own = {path: self._sessions.pop(path) for path in list(self._sessions)}
        for file in files:
            self._sessions[file.path] = set()
            for record in file.records:
                self._sessions[file.path].add(record.session)
                if isinstance(record, SessionForgotten):
                    self._forget(record.session)
        self._sessions |= own
        self._remove_done()

    def append(self, record: SessionRecord) -> None:
        """Writes a record. Raises StorageFailed; the journal is then as before."""
        if self._current is None:
            raise StorageFailed(f"the journal {self._directory} is closed, or a failed write could not be taken back")
        if self._size >= self._full:
            self._next_file(self._current)
        frame = framed(encode(record))
        try:
            with storage_errors(self._current):
                write_frame(self._file, frame)
        except StorageFailed:
            self._take_back()
            raise
        self._size += len(frame)
        self._sessions[self._current].add(record.session)
        if isinstance(record, SessionForgotten):
            self._forget(record.session)
            try:
                self._remove_done()
            except StorageFailed:  # the record is written all the same
                log.exception("a file of sessions that are forgotten was not removed")

    def close(self) -> None:
        """Forces the newest file onto the disk and closes it. A second call does nothing."""
        if self._current is None:
            return
        closed, self._current = self._current, None
        try:
            with storage_errors(closed):
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def _begin(self, number: int, whole: bool) -> None:
        """Begins a file. `whole`: nothing is missing before it. Raises StorageFailed; there is no such file then."""
        path = self._directory / f"{number:06d}.log"
        head = framed(to_json({"format": FORMAT, "boot": self._boot, "whole": whole}).encode())
        with storage_errors(path):
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
            try:
                write_frame(file, head)
                fsync_directory(self._directory)
            except OSError:
                os.close(file)
                path.unlink()
                raise
        self._file, self._current, self._size = file, path, len(head)
        self._sessions[path] = set()

    def _next_file(self, full: Path) -> None:
        """Begins a file behind the `full` one. Raises StorageFailed; the next record then tries again."""
        file = self._file
        self._begin(int(full.stem) + 1, whole=True)
        try:
            with storage_errors(full):
                os.fsync(file)
        finally:
            os.close(file)

    def _take_back(self) -> None:
        """Cuts off what a failed write has left. Where even that fails, nothing more may be written behind it."""
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            os.close(self._file)
            self._current = None

    def _forget(self, session: str) -> None:
        for sessions in self._sessions.values():
            sessions.discard(session)

    def _remove_done(self) -> None:
        """Removes files of which no session is left, from the oldest on: what a file says of the end of a session
        counts as long as an older one tells of its beginning."""
        for path in list(self._sessions):
            if path == self._current or self._sessions[path]:
                return
            with storage_errors(path):
                path.unlink()
            del self._sessions[path]


def _with_beginnings(records: Replayed) -> Iterator[SessionRecord | RecordsLost]:
    """Yields the records of sessions whose beginning is there: a file is removed only when all its sessions were
    forgotten, so the others are of sessions that a later record forgets."""
    known: set[str] = set()
    for record in records:
        if isinstance(record, SessionOpened):
            known.add(record.session)
        if isinstance(record, RecordsLost) or record.session in known:
            yield record
        if isinstance(record, SessionForgotten):
            known.discard(record.session)


def _read(path: Path, last: bool) -> _JournalFile:
    with storage_errors(path):
        contents = path.read_bytes()
    payloads = list(frames(contents))
    end = payloads[-1][1] if payloads else 0
    intact = end == len(contents) or (last and is_interrupted(contents[end:]))
    if not payloads:
        return _JournalFile(path, {}, [], 0, intact)
    head = json.loads(payloads[0][0])
    if head["format"] != FORMAT:
        raise StorageFailed(f"{path} has the format {head['format']}; expected {FORMAT}: move it elsewhere")
    return _JournalFile(path, head, [decode(payload) for payload, _ in payloads[1:]], end, intact)
