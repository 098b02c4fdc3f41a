"""Files on their way between machines: any cut puts together again, and what is torn or altered never gets its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.checkpoint.pieces import Assembly, Piece, cut, flow, held, of_rooms, read_piece
from trireme.core.errors import DiskFull, StorageFailed
from trireme.process import faults


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, list[FileRecord]]:
    """A commit with three files, one of them empty."""
    commit = tmp_path / "there"
    texts = {"a": b"0123456789", "empty": b"", "b": b"xyz"}
    return commit, [write_bytes(commit / "trainer", name, text) for name, text in texts.items()]


@pytest.fixture(autouse=True)
def unarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_passed", faults.Counter())


def move(source: Path, target: Path, files: list[FileRecord], piece_bytes: int = 4) -> None:
    assembly = Assembly(target)
    for piece in cut(files, piece_bytes):
        assembly.take(piece, read_piece(source, piece))


def names(directory: Path) -> list[str]:
    return sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())


@given(sizes=st.lists(st.integers(0, 40), max_size=5), piece_bytes=st.integers(1, 20))
def test_pieces_cover_each_file_once_and_in_order(sizes: list[int], piece_bytes: int) -> None:
    files = [FileRecord(str(number), size, "") for number, size in enumerate(sizes)]
    pieces = list(cut(files, piece_bytes))
    for record in files:
        own = [piece for piece in pieces if piece.record == record]
        assert [byte for p in own for byte in range(p.offset, p.offset + p.size)] == list(range(record.size))
        assert [piece.is_last for piece in own] == [False] * (len(own) - 1) + [True]
        assert all(0 < piece.size <= piece_bytes for piece in own if record.size)
    assert [piece.record for piece in pieces] == sorted((p.record for p in pieces), key=files.index)


@pytest.mark.parametrize("piece_bytes", [1, 4, 10, 100])
def test_files_arrive_as_they_were(written: tuple[Path, list[FileRecord]], tmp_path: Path, piece_bytes: int) -> None:
    source, files = written
    move(source, tmp_path / "here", files, piece_bytes)
    assert names(tmp_path / "here") == names(source)
    assert held(tmp_path / "here", files, contents=True) == files


@pytest.mark.parametrize(("fault", "said"), [("tear", "bytes arrived of a piece with 4"), ("corrupt", "checksum")])
def test_a_torn_piece_and_a_wrong_checksum_leave_no_file(
    written: tuple[Path, list[FileRecord]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    source, files = written
    monkeypatch.setenv("TRIREME_FAULTS", f"pieces.read@2={fault}")
    with pytest.raises(StorageFailed, match=said):
        move(source, tmp_path / "here", files)
    assert names(tmp_path / "here") == []
    move(source, tmp_path / "here", files)  # the same files, sent again
    assert held(tmp_path / "here", files, contents=True) == files


def test_a_full_disk_says_so_and_leaves_no_half_file(
    written: tuple[Path, list[FileRecord]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, files = written
    monkeypatch.setenv("TRIREME_FAULTS", "pieces.write@2=full")
    with pytest.raises(DiskFull, match="trainer/a"):
        move(source, tmp_path / "here", files)
    assert names(tmp_path / "here") == []


def test_pieces_out_of_order_are_refused(written: tuple[Path, list[FileRecord]], tmp_path: Path) -> None:
    source, files = written
    first, second, third = list(cut(files[:1], 4))
    assembly = Assembly(tmp_path / "here")
    assembly.take(first, read_piece(source, first))
    with pytest.raises(StorageFailed, match="out of order"):
        assembly.take(third, read_piece(source, third))
    with pytest.raises(StorageFailed, match="out of order"):  # the one before has ended the file
        assembly.take(second, read_piece(source, second))
    assert names(tmp_path / "here") == []


def test_an_abandoned_file_is_deleted(written: tuple[Path, list[FileRecord]], tmp_path: Path) -> None:
    source, files = written
    assembly = Assembly(tmp_path / "here")
    assembly.take(piece := next(cut(files, 4)), read_piece(source, piece))
    assert names(tmp_path / "here") == ["trainer/a.arriving"]
    assembly.abandon()
    assert names(tmp_path / "here") == []


def test_a_file_that_is_gone_or_shorter_is_not_read(written: tuple[Path, list[FileRecord]]) -> None:
    source, (a, *_) = written
    assert len(read_piece(source, Piece(FileRecord(a.path, 99, a.checksum), 8, 4))) == 2
    (source / a.path).unlink()
    with pytest.raises(StorageFailed, match="cannot read"):
        read_piece(source, Piece(a, 0, 4))


@pytest.mark.parametrize("path", ["../outside", "/etc/hosts"])
def test_no_path_leads_out_of_the_commit(tmp_path: Path, path: str) -> None:
    (tmp_path / "outside").write_bytes(b"1")
    record = FileRecord(path, 1, "")
    with pytest.raises(StorageFailed, match="leads out of the commit"):
        read_piece(tmp_path / "commit", Piece(record, 0, 1))
    with pytest.raises(StorageFailed, match="leads out of the commit"):
        Assembly(tmp_path / "commit").take(Piece(record, 0, 1), np.zeros(1, np.uint8))


def test_what_is_held_has_its_size_and_if_asked_its_contents(written: tuple[Path, list[FileRecord]]) -> None:
    source, files = written
    (source / files[0].path).write_bytes(b"0123456780")
    (source / files[2].path).write_bytes(b"x")
    assert held(source, files) == files[:2]
    assert held(source, files, contents=True) == files[1:2]


@given(count=st.integers(0, 12), window=st.integers(1, 5))
def test_no_more_pieces_than_the_window_are_on_the_way(count: int, window: int) -> None:
    on_the_way, most, seen = 0, 0, []

    def send(piece: Piece) -> int:
        nonlocal on_the_way, most
        on_the_way += 1
        most = max(most, on_the_way)
        return piece.offset

    def arrived(piece: Piece, sent: int) -> None:
        nonlocal on_the_way
        on_the_way -= 1
        assert sent == piece.offset
        seen.append(sent)

    def pieces() -> Iterator[Piece]:
        yield from (Piece(FileRecord("f", count, ""), n, 1) for n in range(count))

    flow(pieces(), send, arrived, window)
    assert seen == list(range(count))
    assert most == min(count, window)


def test_rooms_need_their_own_parts_alone() -> None:
    files = [FileRecord(path, 0, "") for path in ("inference/a", "orchestrator/b", "trainer/.metadata", "trainer/c")]
    assert [record.path for record in of_rooms(files, ["trainer"])] == ["trainer/.metadata", "trainer/c"]
    assert of_rooms(files, []) == []
