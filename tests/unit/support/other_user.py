"""Acts as another user of the machine."""

import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

NOBODY = 65534
without_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def as_another_user(act: Callable[[], object]) -> str:
    """Runs `act` in a child as another user. Returns the name of the error that it raised, else what it returned."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        outcome = ""
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            outcome = str(act() or "")
        except BaseException as error:
            outcome = type(error).__name__
        finally:
            os.write(writer, outcome.encode()[:60_000])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        outcome = pipe.read()
    os.waitpid(pid, 0)
    return outcome


def reached(paths: Iterable[Path]) -> str:
    """Tries to read, enter, change, move and call each path. Returns those with which one of that was possible."""
    reachable = []
    for path in paths:
        attempts: list[Callable[[], object]] = [
            path.read_bytes,
            lambda path=path: list(path.iterdir()),  # type: ignore[misc]
            lambda path=path: (path / "x").touch(),  # type: ignore[misc]
            lambda path=path: path.rename(f"{path}-x"),  # type: ignore[misc]
            lambda path=path: socket.socket(socket.AF_UNIX).connect(str(path)),  # type: ignore[misc]
        ]
        for attempt in attempts:
            with suppress(OSError):
                attempt()
                reachable.append(str(path))
                break
    return " ".join(reachable)
