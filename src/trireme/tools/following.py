"""Reads the directory of a run again and again while the run writes it.

Takes no lock and imports no Ray, so a reader neither delays a run nor prevents its resume.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.supervision.status import DriverProcess


@dataclass
class LineFollower:
    """Reads a file to which a run appends lines; returns each line once."""

    file: Path
    unread: int = 0
    """The number of bytes of the file that `poll` has left unread."""
    _inode: int = 0
    _position: int = 0

    def poll(self, most_bytes: int | None = None) -> tuple[bool, list[bytes]]:
        """Returns (restarted, the new whole lines), from at most the next `most_bytes` of the file (None: all).
        `restarted` is True if the lines begin with the first line of the file. This is so on the first read, and if the
        file was replaced or cut since the last call, for example by a run that goes back to a checkpoint."""
        if not self.file.exists():
            return False, []
        with self.file.open("rb") as lines:
            status = os.fstat(lines.fileno())
            restarted = status.st_ino != self._inode or status.st_size < self._position
            if restarted:
                self._inode = status.st_ino
                self._position = 0
            lines.seek(self._position)
            contents = lines.read(-1 if most_bytes is None else most_bytes)
        new, newline, _torn = contents.rpartition(b"\n")
        self._position += len(new) + len(newline)
        self.unread = max(0, status.st_size - self._position)
        return restarted, [line for line in new.splitlines() if line]


def run_config(root: Path) -> Mapping[str, Any]:
    """Returns the configuration of the run in `root`; empty before it is written."""
    file = root / "config.json"
    config: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return config


def tokenizer_of(config: Mapping[str, Any]) -> str | None:
    """Returns the directory of a run's tokenizer. Returns None if the tokenizer is no directory on this machine."""
    model = config.get("model", {})
    name = model.get("tokenizer") or model.get("name")
    if name and Path(name).is_dir():
        return name
    return None


def driver_state(root: Path) -> str:
    """Returns a text for people on whether the driver of the run in `root` is alive, as far as this machine can see.
    `is_live` turns the text into True or False."""
    driver = DriverProcess.read(root)
    if driver is None:
        return "not started"
    if driver.alive is None:
        return f"driver on {driver.node}, process {driver.pid}"
    if driver.alive:
        return f"running, process {driver.pid}"
    return "not running"


def is_live(driver: str) -> bool:
    """Returns True if `driver`, a text from `driver_state`, says that the driver is alive, or may be on another
    machine."""
    return driver.startswith(("running", "driver on"))
