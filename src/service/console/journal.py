"""Reads the journal of sessions beside the process that writes it: what there is of each session, and where.

Only the place of each record is kept, and sums; the tokens of one session are read when it is looked at. A look reads a
bounded part of the journal, so that one of many gigabytes is taken in over several looks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from service.sessions.journal import FORMAT, FRAME, frames
from service.sessions.records import (
    AnswersDelivered,
    RecordsLost,
    RewardGiven,
    SessionEnded,
    SessionForgotten,
    SessionOpened,
    SessionRecord,
    TurnAnswered,
    decode,
)
from service.sessions.session import LOST, AgentSession
from trireme.core.errors import StorageFailed

LOOK_BYTES = 16 << 20
"""Bytes that one look reads, if no record is longer."""
SESSION_BYTES = 64 << 20
"""Bytes of the records of one session that are shown; later ones are left out."""
LONGEST = 256 << 20
"""Bytes of a record beyond which a file is taken for damaged."""


@dataclass
class SessionSummary:
    """The sums of a session's records, and where these are."""

    opened: SessionOpened
    last: float
    places: list[tuple[Path, int, int]] = field(default_factory=list)
    """File, first byte and length of the payload of each record."""
    turns: int = 0
    answers: int = 0
    sampled: int = 0
    """Tokens."""
    delivered: int = 0
    rewards: dict[int | None, float] = field(default_factory=dict)
    ended: str | None = None
    """The reason for its end; None: it is open."""

    def take(self, record: SessionRecord) -> None:
        """Counts a record."""
        self.last = record.at
        match record:
            case TurnAnswered():
                self.turns += 1
                self.answers += len(record.turn.answers)
                self.sampled += sum(len(answer.tokens) for answer in record.turn.answers)
            case AnswersDelivered():
                self.delivered += len(record.nodes)
            case RewardGiven():
                self.rewards[record.node] = record.value
            case SessionEnded():
                self.ended = self.ended or record.reason


class JournalReader:
    """Follows the files in `directory`. `sessions` are those that were not forgotten, oldest first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begin()

    def _begin(self) -> None:
        self.sessions: dict[str, SessionSummary] = {}
        self._read: dict[Path, tuple[int, int]] = {}
        """Of each file its inode, and where its last record that was read ends."""
        self._boot: str | None = None

    def look(self, most_bytes: int = LOOK_BYTES) -> int:
        """Reads on. Returns the bytes that are still unread: 0 when all is known. Raises StorageFailed for files of
        another version."""
        paths = sorted(self._directory.glob("*.log"))
        sizes = {}
        for path in paths:
            try:
                status = path.stat()
            except FileNotFoundError:  # all its sessions were forgotten meanwhile
                continue
            sizes[path] = status.st_size
            inode, read = self._read.setdefault(path, (status.st_ino, 0))
            if inode != status.st_ino or status.st_size < read:
                self._begin()
                return self.look(most_bytes)
        left = most_bytes
        for path, size in sizes.items():
            while left > 0 and self._read[path][1] < size and (taken := self._take(path, left)):
                left -= taken
        last = next(reversed(sizes), None)
        return sum(size - self._read[path][1] for path, size in sizes.items() if path != last or left <= 0)

    def _take(self, path: Path, most_bytes: int) -> int:
        """Reads the next records of a file. Returns their bytes: 0 where there is no whole one."""
        inode, read = self._read[path]
        try:
            with path.open("rb") as file:
                file.seek(read)
                contents = file.read(max(most_bytes, FRAME.size))
                if len(contents) >= FRAME.size and not any(True for _ in frames(contents)):
                    length = min(FRAME.unpack_from(contents)[0], LONGEST)
                    contents += file.read(max(0, FRAME.size + length - len(contents)))
        except FileNotFoundError:
            return 0
        taken = 0
        for payload, end in frames(contents):
            self._note(path, payload, read + end - len(payload), begins=read + taken == 0)
            taken = end
        self._read[path] = inode, read + taken
        return taken

    def _note(self, path: Path, payload: bytes, start: int, begins: bool) -> None:
        if begins:
            self._note_head(path, payload)
            return
        record = decode(payload)
        if isinstance(record, SessionOpened):
            self.sessions[record.session] = SessionSummary(record, record.at)
        if isinstance(record, SessionForgotten):
            self.sessions.pop(record.session, None)
        elif known := self.sessions.get(record.session):
            known.places.append((path, start, len(payload)))
            known.take(record)

    def _note_head(self, path: Path, payload: bytes) -> None:
        """Takes the head of a file: where records may be missing before it, open sessions have ended."""
        head = json.loads(payload)
        if head.get("format") != FORMAT:
            raise StorageFailed(
                f"{path} has the format {head.get('format')}; expected {FORMAT}: open it with the version that wrote it"
            )
        if self._boot is not None and (head["boot"] != self._boot or not head["whole"]):
            for known in self.sessions.values():
                known.ended = known.ended or LOST
        self._boot = head["boot"]

    def session(self, name: str) -> tuple[AgentSession, int] | None:
        """Reads one session, and how many of its records are left out because it is too long; None where it is not
        known, or was forgotten."""
        known = self.sessions.get(name)
        if known is None:
            return None
        shown = _fitting([length for _, _, length in known.places])
        try:
            records = [_payload(*place) for place in known.places[:shown]]
        except FileNotFoundError:
            return None
        session = AgentSession(known.opened, last=known.opened.at)
        for record in map(decode, records[1:]):
            assert not isinstance(record, SessionOpened | SessionForgotten | RecordsLost), "a session is opened once"
            session.apply(record)
        return session, len(known.places) - shown


def _fitting(lengths: Sequence[int]) -> int:
    """Returns how many of the first records fit into SESSION_BYTES."""
    total = 0
    for number, length in enumerate(lengths):
        total += length
        if total > SESSION_BYTES:
            return number
    return len(lengths)


def _payload(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), length, start)
