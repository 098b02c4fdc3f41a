"""Makes private directories, which no other user can enter: for the sockets, logs and temporary files of one driver,
and for the files of one download.

    /tmp/trireme-RANDOM     0700
        owner               held by flock while its process lives
        r/                  Ray's files; Ray opens r/ to all users, and its token does not protect unix sockets

A user who can rename a socket could replace it. If a killed process leaves such a directory, the next process that
makes one at the same place removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

PREFIX = "trireme-"
LOCK = "owner"
LONGEST_BASE = 24
"""Longest path, in bytes, of a directory in which a private directory is made. The private directory's name adds 17
bytes, Ray's directory 2, and Ray's sockets below it 64; the system allows 107 bytes for the path of a socket."""


@contextmanager
def private_directory() -> Iterator[Path]:
    """Context manager: makes a private directory for the files of this driver, yields its path, and removes the
    directory at the end of the `with` block, as `held_directory` does."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > LONGEST_BASE:
        base = Path("/tmp")
    with held_directory(base, PREFIX) as directory:
        yield directory


@contextmanager
def held_directory(base: Path, prefix: str) -> Iterator[Path]:
    """Context manager: makes a private directory in `base`, with a name that begins with `prefix`, yields its path, and
    removes the directory at the end of the `with` block. First removes directories with this prefix that killed
    processes of this user have left in `base`. Raises OSError."""
    for directory in base.glob(f"{escape(prefix)}*"):
        with suppress(OSError):  # of another user, of a process that lives, or of something else
            _sweep(directory)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    with (directory / "new").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (directory / "new").rename(directory / LOCK)  # nobody sees it before it is held
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _sweep(directory: Path) -> None:
    """Removes `directory` if it belongs to this user and the process that made it has ended; otherwise raises
    OSError."""
    if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to another user")
    with (directory / LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in directory.iterdir():
            if path.name != LOCK:  # it goes last: what processes that end still write is removed by the next sweep
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.rmtree(directory)
