"""Makes a private directory for the sockets, logs and temporary files of one driver. No other user can enter it.

    /tmp/trireme-RANDOM     0700
        driver              held by flock while its driver lives
        r/                  Ray's, which it opens to all users; its token does not cover unix sockets

A user who can rename a socket could replace it. The directory of a killed driver is removed by the next driver's start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "trireme-"
LOCK = "driver"
LONGEST_BASE = 24
"""Bytes of the directory in which it lies. The name takes 17, Ray's directory 2, and Ray's sockets below it 64; the
system allows 107."""


@contextmanager
def private_directory() -> Iterator[Path]:
    """Makes a private directory, as the module describes, for the time of the block, and yields its path. Also removes
    the directories of drivers that were killed."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > LONGEST_BASE:
        base = Path("/tmp")
    for directory in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # of another user, of a driver that lives, or of something else
            _sweep(directory)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    with (directory / "new").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (directory / "new").rename(directory / LOCK)  # nobody sees it before it is held
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _sweep(directory: Path) -> None:
    """Removes `directory` if it belongs to a driver of this user that has ended. Raises OSError otherwise."""
    if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to another user")
    with (directory / LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in directory.iterdir():
            if path.name != LOCK:  # it goes last: what processes that end still write is removed by the next sweep
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.rmtree(directory)
