"""A journal tells what was told: after a crash at any byte, each whole record, and no other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_support import LOOK, said

from service.sessions import journal as journals
from service.sessions.journal import Replayed, SessionJournal
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
    encode,
)
from service.sessions.session import SessionBook
from service.sessions.tree import ROOT, SampledAnswer, TurnGiven
from trireme.core.errors import DiskFull, StorageFailed
from trireme.core.types import VersionSpan, WeightIdentity

TEXT = st.text(st.characters(exclude_categories=()), max_size=5)  # with surrogates, which JSON can hold
WEIGHTS = st.builds(WeightIdentity, st.integers(0, 2), st.integers(0, 9), st.sampled_from(["9f3c", "d"]))


@st.composite
def answers(draw: st.DrawFn) -> SampledAnswer:
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ends = np.cumsum(lengths).tolist()
    spans = tuple(
        VersionSpan(draw(WEIGHTS), end - length, end, draw(st.booleans()))
        for length, end in zip(lengths, ends, strict=True)
    )
    values = draw(st.lists(st.floats(-50, 0, width=32), min_size=ends[-1], max_size=ends[-1]))
    message = said("assistant", draw(TEXT))
    if draw(st.booleans()):
        message |= said(
            "assistant", "", thinking=draw(TEXT), tool_calls=[{"name": "look", "arguments": {"é": [1, None]}}]
        )
    tokens = np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), min_size=ends[-1], max_size=ends[-1])), np.int32)
    return SampledAnswer(
        message, tokens, np.asarray(values, np.float32), spans, draw(st.sampled_from(["stop", "length"]))
    )


@st.composite
def histories(draw: st.DrawFn) -> list[SessionRecord]:
    """Records of two sessions, each of which may follow those before it."""
    records: list[SessionRecord] = []
    book = SessionBook()
    for number in range(draw(st.integers(1, 12))):
        name, at = draw(st.sampled_from(["a", "b"])), float(number)
        session = book.sessions.get(name)
        record: SessionRecord
        if session is None:
            record = SessionOpened(name, at, draw(st.integers(-1, 9)), 0.7, draw(TEXT))
        else:
            known = [n for n in range(len(session.tree.nodes)) if session.is_answer(n)]
            kinds = ["turn", "end", "reward"] + ["deliver"] * bool(known) + ["forget"] * bool(session.ended)
            kind = draw(st.sampled_from(kinds))
            if kind == "turn":
                follows = draw(st.sampled_from([ROOT, *known]))
                record = TurnAnswered(
                    name,
                    at,
                    TurnGiven(
                        follows,
                        draw(st.sampled_from([ROOT, follows])),
                        (said("user", draw(TEXT)),),
                        (LOOK,) if follows == ROOT else (),
                        np.asarray(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)), np.int32),
                        tuple(draw(st.lists(answers(), min_size=1, max_size=2))),
                        draw(TEXT),
                    ),
                )
            elif kind == "deliver":
                record = AnswersDelivered(name, at, (draw(st.sampled_from(known)),))
            elif kind == "reward":
                node = draw(st.sampled_from([None, *known]))
                record = RewardGiven(name, at, draw(st.floats(-1e9, 1e9)), node, {"m": 0.5})
            else:
                record = SessionEnded(name, at, draw(TEXT)) if kind == "end" else SessionForgotten(name, at)
        book.apply(record)
        records.append(record)
    return records


def state(book: SessionBook) -> dict[str, Any]:
    """Returns all that sessions hold, as values that can be compared."""
    return {
        name: {
            "opened": session.opened,
            "ended": session.ended,
            "last": session.last,
            "rewards": session.rewards,
            "counts": vars(session.tree.counts),
            "nodes": [
                [n.parent, n.strand, n.start, n.end, n.follows, n.began, n.children, n.message, n.spans, n.turns]
                for n in session.tree.nodes
            ],
            "said": [(n.stop_reason, n.delivered) for n in session.tree.nodes],
            "columns": [
                (strand.origin, strand.tokens(0, strand.length).tolist(), strand.logprobs(0, strand.length).tobytes())
                for strand in session.tree.strands
            ],
        }
        for name, session in book.sessions.items()
    }


@pytest.fixture(autouse=True)
def nothing_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forcing files onto the disk takes the time of these tests, and changes nothing that they see."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def told(records: Replayed | Sequence[SessionRecord]) -> dict[str, Any]:
    book = SessionBook()
    for record in records:
        book.apply(record)
    return state(book)


def written(directory: Path, records: Sequence[SessionRecord], **options: Any) -> list[int]:
    """Writes a journal; returns the size of its first file after each record, the one with none first."""
    journal = SessionJournal(directory, "boot", **options)
    journal.replay()
    first = directory / "000000.log"
    sizes = [first.stat().st_size]
    for record in records:
        journal.append(record)
        sizes.append(first.stat().st_size if first.exists() else 0)
    journal.close()
    return sizes


def replayed(directory: Path, boot: str = "boot") -> Replayed:
    journal = SessionJournal(directory, boot)
    records = journal.replay()
    journal.close()
    return records


def living(records: Sequence[SessionRecord]) -> list[SessionRecord]:
    return [record for record in records if not isinstance(record, SessionForgotten)]


@settings(max_examples=50, deadline=None)
@given(histories())
def test_records_are_read_as_they_were_written(records: list[SessionRecord]) -> None:
    assert told([decode(encode(record)) for record in records]) == told(records)


def after_a_crash(contents: bytes, end: int) -> dict[str, Any]:
    """Returns what is there after a restart, where a crash left the first `end` bytes."""
    with tempfile.TemporaryDirectory() as place:
        Path(place, "000000.log").write_bytes(contents[:end])
        return told(replayed(Path(place)))


@settings(max_examples=60, deadline=None)
@given(histories(), st.data())
def test_a_crash_leaves_an_earlier_state(records: list[SessionRecord], data: st.DataObject) -> None:
    records = living(records)
    with tempfile.TemporaryDirectory() as place:
        sizes = written(Path(place), records)
        contents = Path(place, "000000.log").read_bytes()
    for end in data.draw(st.lists(st.integers(0, len(contents)), min_size=5, max_size=5)):
        whole = sum(size <= end for size in sizes) - 1
        assert after_a_crash(contents, end) == told(records[: max(whole, 0)])


def test_a_crash_at_every_byte(tmp_path: Path) -> None:
    records = [*some_records("a", 2), AnswersDelivered("a", 3.0, (1,)), SessionEnded("a", 4.0, "done")]
    sizes = written(tmp_path, records)
    contents = (tmp_path / "000000.log").read_bytes()
    states = [told(records[:count]) for count in range(len(records) + 1)]
    for end in range(len(contents) + 1):
        whole = sum(size <= end for size in sizes) - 1
        assert after_a_crash(contents, end) == states[max(whole, 0)], end


@settings(max_examples=60, deadline=None)
@given(histories(), st.data())
def test_a_changed_byte_ends_what_was_open(records: list[SessionRecord], data: st.DataObject) -> None:
    records = living(records)
    with tempfile.TemporaryDirectory() as place:
        sizes = written(Path(place), records)
        file = Path(place, "000000.log")
        contents = bytearray(file.read_bytes())
        changed = data.draw(st.integers(sizes[0], len(contents) - 1))
        contents[changed] ^= data.draw(st.integers(1, 255))
        file.write_bytes(contents)
        before = sum(size <= changed for size in sizes) - 1
        for _ in range(2):  # the second time the damage itself is gone
            assert told(replayed(Path(place))) == told([*records[:before], RecordsLost()])


def some_records(name: str, turns: int) -> list[SessionRecord]:
    answer = SampledAnswer(
        said("assistant", "a"),
        np.arange(3, dtype=np.int32),
        np.full(3, -0.5, np.float32),
        (VersionSpan(WeightIdentity(0, 1, "d"), 0, 3),),
        "stop",
    )
    turn = TurnGiven(ROOT, ROOT, (said("user", "q"),), (), np.arange(5, dtype=np.int32), (answer,))
    return [SessionOpened(name, 0.0, 1, 1.0), *(TurnAnswered(name, float(n), turn) for n in range(turns))]


def test_a_new_boot_ends_what_was_open_once(tmp_path: Path) -> None:
    written(tmp_path, some_records("a", 1))
    assert replayed(tmp_path, "next")[-1] == RecordsLost()
    journal = SessionJournal(tmp_path, "next")
    assert journal.replay()[-1] == RecordsLost()
    for record in some_records("b", 1):
        journal.append(record)
    journal.close()
    book = SessionBook()
    for each in replayed(tmp_path, "next"):
        book.apply(each)
    ended = {name: session.ended is not None for name, session in book.sessions.items()}
    assert ended == {"a": True, "b": False}


def test_files_are_removed_from_the_oldest_on_when_their_sessions_are_forgotten(tmp_path: Path) -> None:
    journal = SessionJournal(tmp_path, "boot", full=600)
    journal.replay()
    for record in [*some_records("a", 2), *some_records("b", 2), SessionForgotten("b", 9.0)]:
        journal.append(record)
    assert len(list(tmp_path.glob("*.log"))) > 1
    assert list(told(replayed(tmp_path))) == ["a"]
    journal.append(SessionForgotten("a", 9.0))
    journal.close()
    for _ in range(2):
        assert told(replayed(tmp_path)) == {}
    assert len(list(tmp_path.glob("*.log"))) == 1


def test_a_name_may_be_used_again(tmp_path: Path) -> None:
    first = [*some_records("a", 1), SessionEnded("a", 2.0, "done"), SessionForgotten("a", 3.0)]
    records = [*first, *some_records("a", 2)]
    written(tmp_path, records, full=600)
    for _ in range(3):
        assert told(replayed(tmp_path)) == told(records[4:])


def test_damage_in_an_older_file_sets_the_later_ones_aside(tmp_path: Path) -> None:
    records = some_records("a", 6)
    written(tmp_path, records, full=600)
    first, *later = sorted(tmp_path.glob("*.log"))
    contents = first.read_bytes()
    first.write_bytes(contents[:-1])
    for _ in range(2):
        found = replayed(tmp_path)
        assert found[-1] == RecordsLost()
        assert len(found) < len(records)
    assert [path.stem for path in sorted(tmp_path.glob("*.damaged"))] == [path.stem for path in later]


def test_a_failed_write_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SessionJournal(tmp_path, "boot")
    journal.replay()
    first, second = some_records("a", 1)
    journal.append(first)
    write = os.write

    def full(file: int, frame: bytes) -> int:
        if len(frame) > 10:
            return write(file, frame[:-10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(journals.os, "write", full)
        with pytest.raises(DiskFull, match=r"000000\.log"):
            journal.append(second)
    journal.append(replace(second, at=5.0))
    journal.close()
    assert told(replayed(tmp_path)) == told([first, replace(second, at=5.0)])
    with pytest.raises(StorageFailed, match="is closed"):
        journal.append(second)


def test_a_disk_that_is_full_when_a_new_file_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, records, kept = SessionJournal(tmp_path, "boot", full=600), some_records("a", 8), list[SessionRecord]()
    journal.replay()
    write = os.write

    def full(file: int, frame: bytes) -> int:
        if b'"format"' in frame:
            raise OSError(28, "No space left on device")
        return write(file, frame)

    for record in records:
        with monkeypatch.context() as patched:
            patched.setattr(journals.os, "write", full)
            for _ in range(2):
                try:
                    journal.append(record)
                except DiskFull:
                    continue
                break
            else:
                patched.undo()
                journal.append(record)  # there is room again
        kept.append(record)
    journal.close()
    assert len(list(tmp_path.glob("*.log"))) > 1
    assert told(replayed(tmp_path)) == told(kept)


def test_a_file_that_cannot_be_removed_costs_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SessionJournal(tmp_path, "boot", full=600)
    journal.replay()
    records = [*some_records("a", 3), SessionForgotten("a", 9.0), *some_records("b", 3)]

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        for record in records:
            journal.append(record)  # what is raised would be taken for a record that is not there
    journal.close()
    assert told(replayed(tmp_path)) == told(records)


def test_a_journal_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(journals, "FORMAT", 2)
        written(tmp_path, some_records("a", 1))
    with pytest.raises(StorageFailed, match="format 2; expected 1"):
        replayed(tmp_path)
