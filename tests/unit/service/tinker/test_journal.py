"""The journal of a Tinker server: what is read is what was written, whatever was cut off or damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.tinker.journal import TinkerJournal
from service.tinker.promises import Success
from service.tinker.records import (
    CloneJoined,
    OutcomeKnown,
    Record,
    SessionBegun,
    SessionOver,
)
from trireme.core.errors import StorageFailed

FIRST: list[Record] = [SessionBegun("s", "client-1", {"display_name": "é"}), CloneJoined("s:sample:0")]
NEXT: list[Record] = [OutcomeKnown("s:sample:0/1", Success(b"\0bytes")), SessionOver("s")]


def written(directory: Path, boot: str = "one") -> TinkerJournal:
    journal = TinkerJournal(directory, boot)
    assert journal.replay().records == []
    journal.begin(FIRST)
    for record in NEXT:
        journal.append(record)
    return journal


def newest(directory: Path) -> Path:
    return max(directory.glob("*.log"))


def test_what_was_written_is_read_wherever_the_last_write_was_interrupted(tmp_path: Path) -> None:
    written(tmp_path).close()
    whole = newest(tmp_path).read_bytes()
    sizes = []
    for size in range(len(whole) - 1, 0, -1):
        newest(tmp_path).write_bytes(whole[:size])
        try:
            replayed = TinkerJournal(tmp_path, "one").replay()
        except StorageFailed:
            break
        assert replayed.records == [*FIRST, *NEXT][: len(replayed.records)]
        assert not replayed.lost
        sizes.append(len(replayed.records))
    assert set(sizes) == {0, 1, 2, 3}
    assert sizes == sorted(sizes, reverse=True)


def test_a_new_file_takes_the_place_of_all_others(tmp_path: Path) -> None:
    journal = written(tmp_path)
    journal.begin(NEXT)
    journal.append(FIRST[0])
    assert len(list(tmp_path.iterdir())) == 1
    assert TinkerJournal(tmp_path, "one").replay().records == [*NEXT, FIRST[0]]
    newest(tmp_path).with_name("000007.new").write_bytes(b"it was only being begun")
    assert TinkerJournal(tmp_path, "one").replay().records == [*NEXT, FIRST[0]]
    journal.close()
    journal.close()
    with pytest.raises(StorageFailed, match="is closed"):
        journal.append(FIRST[0])


def test_it_is_full_when_it_is_large_and_has_grown(tmp_path: Path) -> None:
    journal = TinkerJournal(tmp_path, "one", full=400)
    journal.begin([])
    records = 0
    while not journal.is_full:
        journal.append(FIRST[0])
        records += 1
    assert 2 < records < 10
    journal.begin([FIRST[0]] * 20)
    assert not journal.is_full, "it is as small as it can be"


@pytest.mark.parametrize("damage", ["boot", "flip"])
def test_it_tells_where_records_may_be_missing(tmp_path: Path, damage: str) -> None:
    written(tmp_path, "another" if damage == "boot" else "one").close()
    if damage == "flip":
        contents = bytearray(newest(tmp_path).read_bytes())
        contents[-3] ^= 1
        newest(tmp_path).write_bytes(contents)
    replayed = TinkerJournal(tmp_path, "one").replay()
    assert replayed.lost
    assert replayed.records == [*FIRST, *NEXT][: 3 if damage == "flip" else 4]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, write = written(tmp_path), os.write

    def half(file: int, data: bytes) -> int:
        if len(data) > 4:
            return write(file, data[:4])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half)
        with pytest.raises(StorageFailed, match="No space left"):
            journal.append(FIRST[0])
        with pytest.raises(StorageFailed, match="No space left"):
            journal.begin(FIRST)
    journal.append(FIRST[0])
    assert TinkerJournal(tmp_path, "one").replay().records == [*FIRST, *NEXT, FIRST[0]]


def test_a_file_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.tinker.journal.FORMAT", 99)
    written(tmp_path).close()
    monkeypatch.undo()
    with pytest.raises(StorageFailed, match="has the format 99; expected 3: start the version of the server that"):
        TinkerJournal(tmp_path, "one").replay()
    newest(tmp_path).write_bytes(b"something else that is no journal at all")
    with pytest.raises(StorageFailed, match="damaged at its beginning"):
        TinkerJournal(tmp_path, "one").replay()
