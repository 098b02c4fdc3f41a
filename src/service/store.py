"""Stores rows in one sqlite file. A service that is started again reads from it what its last process has promised to
clients.

    DIR/store.sqlite    meta: key, value          `format` and `boot`
                        rows: id, owner, checksum, head, columns      in the order of `id`
    DIR/store.lock      held by flock while a process writes the store, and names that process

A row is committed before any answer relies on it. From then on it survives the death of this process, whatever killed
it. It is not forced onto the disk, which would cost milliseconds for each request: on a local file system sqlite keeps
a write-ahead log, and forces the log only from time to time. So the store names the machine's boot. After another boot
the last rows may be missing, and `open` returns True until the service has dealt with the loss (`note_boot`).

Where the file system is not local, sqlite's log does not work: there the store has a rollback journal, forces each row,
and no other process can read it while it is open.

sqlite rolls back a row after an interrupted commit. Other damage is refused by name, as is a store of another format:
nothing is dropped in silence. Removed rows leave pages that later rows fill, so the file is as large as its largest
contents at any one time.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from trireme.checkpoint.files import make_directory, storage_errors
from trireme.core.errors import StorageFailed
from trireme.core.finite_json import to_json

FILE = "store.sqlite"
LOCK = "store.lock"
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""The file in which Linux gives each boot of the machine an id."""
MOUNTS = Path("/proc/self/mountinfo")
LOCAL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
"""Types of file systems that belong to one machine, and on which processes share memory by a file."""
BUSY_S = 5.0
"""Seconds for which a reader that copies the store may hold up its writer, and the other way round."""
LOCK_S = 10.0
"""Seconds to wait for the lock of a store: within this time, a process that was killed while it had the store open has
ended."""
CHECKPOINT_PAGES = 4096
"""Pages of 4 KiB in the write-ahead log after which they are moved into the file."""
DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rows (
    id INTEGER PRIMARY KEY, owner TEXT NOT NULL, checksum INTEGER NOT NULL, head TEXT NOT NULL, columns BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS owners ON rows (owner);
"""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One row of the store: a JSON object (`head`), the bytes of its columns, and its `owner`, the key by which rows
    are replaced and removed."""

    owner: str
    head: dict[str, Any]
    columns: bytes = b""


class Store:
    """A sqlite file in `directory` with the rows that a service needs after a restart; call `open` first. `row_format`:
    name and number of the format of its rows. `boot`: the id of the machine's present boot (None: read from the
    system). If another boot wrote the store, the machine was restarted, and the last rows may be lost."""

    def __init__(self, directory: Path, row_format: str, boot: str | None = None) -> None:
        self.path = directory / FILE
        self._format = row_format
        self._boot = boot or BOOT.read_text().strip()
        self._base: sqlite3.Connection | None = None
        self._lock = -1

    def open(self) -> bool:
        """Opens the store, or makes an empty one. Returns True if the last rows may be missing, because the machine was
        restarted after they were written. Raises StorageFailed if the store cannot be read or written, if another
        process holds it, or if it is damaged or has another format."""
        with storage_errors(self.path):
            make_directory(self.path.parent)
            self._lock = _locked(self.path.with_name(LOCK))
        try:
            with _store_errors(self.path):
                self._base = self._opened()
                meta = dict(self._base.execute("SELECT key, value FROM meta"))
                _check_format(self.path, meta, self._format)
        except BaseException:
            self.close()
            raise
        return bool(meta["boot"] != self._boot)

    def _opened(self) -> sqlite3.Connection:
        base = sqlite3.connect(self.path, BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            local = file_system(self.path.parent) in LOCAL
            if not local:  # before anything is read: the file may have a log of its time on a local file system
                base.execute("PRAGMA locking_mode = EXCLUSIVE")
            (mode,) = base.execute(f"PRAGMA journal_mode = {'WAL' if local else 'TRUNCATE'}").fetchone()
            if mode != "wal":
                log.warning("%s is on no local file system: each row is forced, which takes milliseconds", self.path)
            base.execute("PRAGMA synchronous = NORMAL")
            base.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
            base.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
            head = [("format", self._format), ("boot", self._boot)]
            base.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", head)
        except BaseException:
            base.close()
            raise
        return base

    def rows(self) -> Iterator[Row]:
        """Yields all rows in the order in which they were added. Raises StorageFailed if a row is damaged."""
        with _store_errors(self.path):
            yield from _rows(self._opened_base(), self.path)

    def append(self, row: Row) -> None:
        """Adds a row after all others. Raises StorageFailed; the store is then unchanged."""
        head = to_json(row.head)
        columns = row.owner, _checksum(head, row.columns), head, row.columns
        self._execute("INSERT INTO rows (owner, checksum, head, columns) VALUES (?, ?, ?, ?)", *columns)

    def put(self, row: Row) -> None:
        """Replaces the row of `row.owner` and keeps its place in the order. If the owner has no row yet, adds `row`
        after all others. Only for stores with at most one row for each owner. Raises StorageFailed; the store is then
        unchanged."""
        head = to_json(row.head)
        columns = _checksum(head, row.columns), head, row.columns, row.owner
        changed = self._execute("UPDATE rows SET checksum = ?, head = ?, columns = ? WHERE owner = ?", *columns)
        if not changed.rowcount:
            self.append(row)

    def remove(self, owner: str) -> None:
        """Removes all rows of an owner. Raises StorageFailed; the store is then unchanged."""
        self._execute("DELETE FROM rows WHERE owner = ?", owner)

    def note_boot(self) -> None:
        """Records that the service has dealt with a restart of the machine, which may have lost rows: `open` returns
        False until the next restart. Raises StorageFailed."""
        self._execute("UPDATE meta SET value = ? WHERE key = 'boot'", self._boot)

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        with _store_errors(self.path):
            return self._opened_base().execute(statement, values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Context manager: commits all changes that are made in its `with` block together. If the block or the commit
        raises, none of the changes is made. The block must not await. Raises StorageFailed."""
        base = self._opened_base()
        with _store_errors(self.path):
            base.execute("BEGIN IMMEDIATE")
            try:
                yield
                base.execute("COMMIT")
            finally:
                if base.in_transaction:  # sqlite has taken it back itself after some errors
                    base.execute("ROLLBACK")

    def close(self) -> None:
        """Forces all rows onto the disk and closes the store. A second call does nothing. Raises StorageFailed."""
        base = self._base
        lock = self._lock
        self._base = None
        self._lock = -1
        try:
            if base is not None:
                with _store_errors(self.path):
                    base.close()
        finally:
            if lock != -1:
                os.close(lock)

    def _opened_base(self) -> sqlite3.Connection:
        if self._base is None:
            raise StorageFailed(f"{self.path} is closed; expected a store that is open: start the service again")
        return self._base


def read_copy(directory: Path, row_format: str) -> tuple[list[Row], bool]:
    """Reads the store in `directory` without changing a file. Returns (rows, restarted): its rows, and True if the
    machine was restarted after they were written; ([], False) if there is no store. Raises StorageFailed if the store
    cannot be read, for example because a service has locked it, or if its rows are not in the format `row_format`."""
    path = directory / FILE
    if not path.exists():
        return [], False
    with (
        storage_errors(path),
        path.with_name(LOCK).open("rb") as lock,
        _store_errors(path),
        closing(sqlite3.connect(_readable(path, lock), BUSY_S, uri=True)) as base,
        closing(sqlite3.connect(":memory:")) as copy,
    ):
        base.execute("BEGIN")
        base.execute("SELECT key FROM meta").fetchall()  # raises where it is held: `backup` would wait for ever
        base.backup(copy)
        meta = dict(copy.execute("SELECT key, value FROM meta"))
        _check_format(path, meta, row_format)
        return list(_rows(copy, path)), meta["boot"] != BOOT.read_text().strip()


def _readable(path: Path, lock: BinaryIO) -> str:
    """Returns the URI by which sqlite can read a store without changing it. If no process holds the store, takes a
    shared lock on the file `lock`, so that no process can open the store for writing until `lock` is closed. If a
    process holds the store, takes no lock and does not wait."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        whole = not path.with_name(f"{FILE}-wal").exists()  # else a process that was killed has left rows there
    except BlockingIOError:
        whole = False
    return f"{path.absolute().as_uri()}?{'immutable=1' if whole else 'mode=ro'}"


def stamp(directory: Path) -> tuple[tuple[int, int], ...]:
    """Returns the times of change and the sizes of the store's files. Two results differ if the store was written in
    between."""
    files = [path.stat() for path in (directory / FILE, directory / f"{FILE}-wal") if path.exists()]
    return tuple((file.st_mtime_ns, file.st_size) for file in files)


def file_system(directory: Path) -> str:
    """Returns the type of the file system that holds a directory; "" if unknown."""
    kinds: dict[str, str] = {}
    for line in MOUNTS.read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        place = mount.split()[4].encode().decode("unicode_escape")  # a space is written \040
        kinds[place] = rest.split()[0]  # a later line covers an earlier one
    path = directory.resolve()
    return next((kinds[str(place)] for place in (path, *path.parents) if str(place) in kinds), "")


def _rows(base: sqlite3.Connection, path: Path) -> Iterator[Row]:
    for number, owner, checksum, head, columns in base.execute("SELECT * FROM rows ORDER BY id"):
        if checksum != _checksum(head, columns):
            raise StorageFailed(f"{path} is damaged in its row {number}; {_remedy(path)}")
        yield Row(owner, json.loads(head), columns)


def _checksum(head: str, columns: bytes) -> int:
    """Returns the checksum of a row as a signed integer of 64 bits, which sqlite can store. Sqlite itself does not
    notice a changed byte."""
    hashed = xxhash.xxh3_64(head.encode())
    hashed.update(columns)
    return int.from_bytes(hashed.digest(), "big", signed=True)


def _check_format(path: Path, meta: Mapping[str, str], row_format: str) -> None:
    if meta.get("format") != row_format:
        raise StorageFailed(
            f"{path} has the format {meta.get('format')!r}; expected {row_format!r}: start the release of Trireme "
            f"that wrote it, or {_remedy(path)}"
        )


def _remedy(path: Path) -> str:
    return f"move {path.parent} elsewhere to begin without it, which ends all sessions that it has"


def _locked(path: Path) -> int:
    """Locks the lock file `path` for this process, waiting for at most LOCK_S seconds, and returns its descriptor.
    Raises OSError, and StorageFailed if another process holds the lock."""
    lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.05)
                continue
            holder = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
            os.close(lock)
            raise StorageFailed(
                f"{path.with_name(FILE)} is held by {holder}; expected a store that no other process writes: end that "
                "process first, or choose another directory"
            ) from None
        except OSError:
            os.close(lock)
            raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return lock


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    """Context manager: turns an error of sqlite in its `with` block into StorageFailed, or into DiskFull if there was
    no space. The message names `path`."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without what only tells more of it
        if code in DAMAGED:
            raise StorageFailed(f"{path} is damaged ({error}); {_remedy(path)}") from error
        if code == sqlite3.SQLITE_BUSY:
            raise StorageFailed(
                f"{path} has been held by another process for more than {BUSY_S:g} s ({error}): end that process, then "
                "try again"
            ) from error
        with storage_errors(path):
            raise OSError(ENOSPC if code == sqlite3.SQLITE_FULL else 0, str(error)) from error
