"""Reads a run directory again and again while a run writes it.

It uses no Ray and no lock, so watching can neither delay a run nor prevent it from being resumed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trireme.checkpoint.rows import METRICS
from trireme.supervision.status import DriverProcess, Status, read_incidents
from trireme.tools.timeline import target_of
from trireme.tools.watch import drawing

REFRESH_S = 1.0
TAIL_BYTES = 16 * 1024


@dataclass
class LineFollower:
    """Reads the lines of a file to which a run appends, each once."""

    file: Path
    unread: int = 0
    """The bytes that were behind those that the last call has read."""
    _inode: int = 0
    _read: int = 0

    def poll(self, most_bytes: int | None = None) -> tuple[bool, list[bytes]]:
        """Returns the new whole lines, in at most `most_bytes`; with True if the file was replaced or cut, as by a run
        that goes back to a commit: then they are its first ones."""
        if not self.file.exists():
            return False, []
        with self.file.open("rb") as lines:
            status = os.fstat(lines.fileno())
            again = status.st_ino != self._inode or status.st_size < self._read
            if again:
                self._inode, self._read = status.st_ino, 0
            lines.seek(self._read)
            found = lines.read(-1 if most_bytes is None else most_bytes)
        new, whole, _torn = found.rpartition(b"\n")
        self._read += len(new) + len(whole)
        self.unread = max(0, status.st_size - self._read)
        return again, [line for line in new.splitlines() if line]


@dataclass
class Follower:
    """Follows a run directory. `rows` are those of its metrics, to which `poll` adds the new ones."""

    root: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = LineFollower(self.root / METRICS)

    def poll(self) -> bool:
        """Returns True if the rows have changed. After the run has gone back to a commit, all are read again."""
        again, lines = self._lines.poll()
        if again:
            self.rows = []
        self.rows += map(json.loads, lines)
        return again or bool(lines)

    @property
    def config(self) -> Mapping[str, Any]:
        """Returns the run's configuration; empty before it is written."""
        file = self.root / "config.json"
        config: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return config

    def logs(self) -> dict[str, list[str]]:
        """Returns the last lines of each of `log_files`."""
        return {name: tail(file) for name, file in self.log_files().items()}

    def log_files(self) -> dict[str, Path]:
        """Returns the log of each room in the newest attempt, and of parts that outlived the attempt that started them,
        as replicas do."""
        attempts = sorted((self.root / "logs").glob("attempt_*"), key=lambda path: int(path.name.partition("_")[2]))
        newest = {file.stem: file for file in sorted(attempts[-1].glob("*.log"))} if attempts else {}
        status = Status.read(self.root)
        for part in status.parts if status else ():
            older = [file for attempt in attempts if (file := attempt / f"{part.name}.log").exists()]
            newest.update({part.name: older[-1]} if older else {})
        return newest

    def driver(self) -> str:
        """Says if the run has a driver, as far as this machine can tell."""
        driver = DriverProcess.read(self.root)
        if driver is None:
            return "not started"
        if driver.alive is None:
            return f"driver on {driver.node}, process {driver.pid}"
        return f"running, process {driver.pid}" if driver.alive else "not running"


def tokenizer_of(config: Mapping[str, Any]) -> str | None:
    """Returns the local directory of a run's tokenizer; None if it is elsewhere, or missing."""
    model = config.get("model", {})
    name = model.get("tokenizer") or model.get("name")
    return name if name and Path(name).is_dir() else None


def tail(file: Path) -> list[str]:
    """Returns the last lines of a text file, at most TAIL_BYTES."""
    with file.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    return lines[1:] if size > TAIL_BYTES and len(lines) > 1 else lines


def follow(follower: Follower, say: Callable[[str], None]) -> None:
    """Says every step and every incident, old and new, to `say`; returns when the run has no driver."""
    steps = incidents = 0
    while True:
        driver = follower.driver()  # first: what a run writes last must not be missed
        follower.poll()
        happened = read_incidents(follower.root)
        if steps > len(follower.rows):
            steps = 0
            say("the run has gone back to a commit")
        lines = []
        for row in follower.rows[steps:]:
            told = "  ".join(f"{name} {row[name]:.4g}" for name in drawing.FIRST_CURVES if row.get(name) is not None)
            line = f"step {row['step'] + 1}/{target_of(follower.config, row)}  {told}"
            lines.append((row.get("time/unix", 0.0), line))
        lines += [(incident.at, f"! {drawing.incident_line(incident)}") for incident in happened[incidents:]]
        for _, line in sorted(lines, key=lambda line: line[0]):
            say(line)
        steps, incidents = len(follower.rows), len(happened)
        if not drawing.goes_on(driver):
            say(drawing.headline(follower.config, follower.rows, driver))
            if status := Status.read(follower.root):
                say(drawing.standing(status, driver))
            return
        time.sleep(REFRESH_S)
