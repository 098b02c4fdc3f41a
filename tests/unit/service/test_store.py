"""A store after deaths of processes, torn files, full disks, and on file systems that are not local."""

import logging
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from service import store as stores
from service.store import CHECKPOINT_PAGES, FILE, Row, Store, file_system, read_copy
from trireme.core.errors import DiskFull, StorageFailed

FORMAT = "letters 1"
BODY = b"\xa5" * 3000
WRITER = """
import os, signal, sys
from pathlib import Path
from service import store as stores
stores.file_system = lambda directory: sys.argv[2]
store = stores.Store(Path(sys.argv[1]), "letters 1")
store.open()
for number in range(1000):
    store.append(stores.Row("a", {"n": number}, b"\\xa5" * 3000))
    print(number, flush=True)
    if number == int(sys.argv[3]):
        with store.transaction():
            store.remove("a")
            store.append(stores.Row("b", {"n": 0}))
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(params=["ext4", "nfs4"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The type of the file system that the store finds."""
    monkeypatch.setattr(stores, "file_system", lambda directory: request.param)
    return str(request.param)


@contextmanager
def opened(directory: Path, row_format: str = FORMAT) -> Iterator[Store]:
    store = Store(directory, row_format)
    store.open()
    try:
        yield store
    finally:
        store.close()


def numbers(store: Store) -> list[int]:
    return [row.head["n"] for row in store.rows()]


def fill(store: Store, count: int) -> None:
    for n in range(count):
        store.append(Row("a", {"n": n}, BODY))


def replace_all(store: Store, row: Row) -> None:
    with store.transaction():
        store.remove("a")
        store.append(row)


def written_by_another(directory: Path, kind: str, transaction_at: int = -1) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(directory), kind, str(transaction_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("last", [0, 1, 40])
def test_every_row_survives_a_killed_process(tmp_path: Path, kind: str, last: int) -> None:
    writer = written_by_another(tmp_path, kind)
    assert writer.stdout is not None
    while int(writer.stdout.readline()) < last:
        pass
    writer.send_signal(signal.SIGKILL)
    committed = last + 1 + len(writer.stdout.readlines())
    assert writer.wait(20) == -signal.SIGKILL
    with opened(tmp_path) as store:
        rows = numbers(store)
    assert rows == list(range(len(rows)))
    assert committed <= len(rows) <= committed + 1


def test_a_transaction_whose_process_dies_leaves_nothing(tmp_path: Path, kind: str) -> None:
    assert written_by_another(tmp_path, kind, transaction_at=5).wait(20) == -signal.SIGKILL
    with opened(tmp_path) as store:
        assert numbers(store) == list(range(6))


def test_a_torn_page_at_the_end_costs_the_rows_behind_it_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "whole") as store:
        fill(store, 12)
        shutil.copytree(tmp_path / "whole", tmp_path / "torn", ignore=shutil.ignore_patterns("*-shm"))
    log = tmp_path / "torn" / f"{FILE}-wal"
    contents = log.read_bytes()
    counts = set()
    for end in range(len(contents), 60_000, -1977):
        shutil.rmtree(tmp_path / "now", ignore_errors=True)
        shutil.copytree(tmp_path / "torn", tmp_path / "now")
        (tmp_path / "now" / log.name).write_bytes(contents[:end])
        with opened(tmp_path / "now") as store:
            rows = numbers(store)
        assert rows == list(range(len(rows)))
        counts.add(len(rows))
    assert len(counts) > 3


@pytest.mark.parametrize(("place", "reason"), [("row", "damaged in its row 1"), ("head", "is damaged")])
def test_damage_is_refused_by_name(tmp_path: Path, place: str, reason: str) -> None:
    with opened(tmp_path) as store:
        fill(store, 3)
    file = tmp_path / FILE
    contents = bytearray(file.read_bytes())
    contents[contents.index(BODY) if place == "row" else 0] ^= 1
    file.write_bytes(contents)
    with pytest.raises(StorageFailed, match=f"{reason}.*; move {tmp_path} elsewhere"), opened(tmp_path) as store:
        numbers(store)


def test_a_store_of_another_format_is_refused(tmp_path: Path, kind: str) -> None:
    with opened(tmp_path) as store:
        fill(store, 1)
    with pytest.raises(StorageFailed, match="format 'letters 1'; expected 'letters 2'"), opened(tmp_path, "letters 2"):
        pass
    with pytest.raises(StorageFailed, match="format 'letters 1'; expected 'letters 2'"):
        read_copy(tmp_path, "letters 2")
    with opened(tmp_path) as store:  # the one that was refused does not hold it
        assert numbers(store) == [0]


def test_one_process_holds_a_store(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = written_by_another(tmp_path, kind)
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(stores, "LOCK_S", 0.1)
    with pytest.raises(StorageFailed, match=f"held by process {writer.pid} on .*end that process"), opened(tmp_path):
        pass
    monkeypatch.setattr(stores, "LOCK_S", 20.0)
    writer.send_signal(signal.SIGKILL)
    with opened(tmp_path) as store:
        assert numbers(store)[0] == 0
    writer.wait(20)


def test_where_the_file_system_is_not_local_one_process_has_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A store whose log was left behind by a process that died is continued there."""
    assert written_by_another(tmp_path, "ext4", transaction_at=3).wait(20) == -signal.SIGKILL
    assert (tmp_path / f"{FILE}-wal").exists()
    monkeypatch.setattr(stores, "file_system", lambda directory: "fuse.sshfs")
    monkeypatch.setattr(stores, "BUSY_S", 0.1)
    with caplog.at_level(logging.WARNING), opened(tmp_path) as store:
        assert not (tmp_path / f"{FILE}-wal").exists()
        store.append(Row("a", {"n": 4}))
        assert numbers(store) == [0, 1, 2, 3, 4]
        with pytest.raises(StorageFailed, match="held by another process"):
            read_copy(tmp_path, FORMAT)
    assert "is on no local file system" in caplog.text
    assert [row.head["n"] for row in read_copy(tmp_path, FORMAT)[0]] == [0, 1, 2, 3, 4]


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(stores, "MOUNTS", mounts)
    lines = [("/", "ext4"), ("/net", "ext4"), ("/net", "nfs4"), ("/net/a\\040b", "tmpfs")]
    mounts.write_text("".join(f"1 2 0:3 / {at} rw shared:1 - {kind} x rw\n" for at, kind in lines))
    assert [file_system(Path(at)) for at in ("/home", "/net/x", "/net/a b/c", "/network")] == [
        "ext4",
        "nfs4",
        "tmpfs",
        "ext4",
    ]


def test_a_failed_write_leaves_the_store_as_it_was(tmp_path: Path, kind: str) -> None:
    with opened(tmp_path) as store:
        fill(store, 2)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        largest = max(path.stat().st_size for path in tmp_path.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 5000, before[1]))
        try:
            with pytest.raises(StorageFailed, match=FILE):
                store.append(Row("a", {"n": 7}, BODY * 10))
            with pytest.raises(StorageFailed, match=FILE):
                replace_all(store, Row("a", {"n": 8}, BODY * 10))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        store.append(Row("a", {"n": 2}))
        assert numbers(store) == [0, 1, 2]
    with opened(tmp_path) as store:
        assert numbers(store) == [0, 1, 2]
    with pytest.raises(StorageFailed, match="is closed"):
        store.append(Row("a", {"n": 3}))


def test_a_full_disk_is_told_from_other_failures(tmp_path: Path, kind: str) -> None:
    with opened(tmp_path) as store:
        assert store._base is not None
        store._base.execute("PRAGMA max_page_count = 12")
        with pytest.raises(DiskFull, match=r"MiB free\); make room"):
            fill(store, 100)
        count = len(numbers(store))
        store.remove("a")
        fill(store, count)


def test_a_day_of_a_hundred_turns_a_second_stays_below_two_gigabytes(tmp_path: Path) -> None:
    """A thousandth of a day: 432 sessions of 20 turns. Each is forgotten an hour after it has ended."""
    day, turns, hour = 432, 20, 18
    with opened(tmp_path) as store:
        for session in range(day):
            for turn in range(turns):
                store.append(Row(str(session), {"kind": "TurnAnswered", "turn": turn}, BODY + BODY[:1500]))
            if session >= hour:
                store.remove(str(session - hour))
        log = (tmp_path / f"{FILE}-wal").stat().st_size
    assert log < 2 * CHECKPOINT_PAGES * 4200
    assert (tmp_path / FILE).stat().st_size * 1000 < 2e9


def test_another_boot_is_told_until_it_was_dealt_with(tmp_path: Path) -> None:
    answers = []
    for boot, deal in (("a", False), ("b", False), ("b", True), ("b", False)):
        store = Store(tmp_path, FORMAT, boot)
        answers.append(store.open())
        if deal:
            store.note_boot()
        store.close()
    assert answers == [False, True, True, False]
