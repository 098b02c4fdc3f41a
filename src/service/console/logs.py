"""The logs of a run, for the console: a part of a file at a time, from its end."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from service.asked import RequestRefused
from trireme.supervision.status import Status

PART_BYTES = 64 << 10
NEWEST_ATTEMPTS = 20


class RunLogs:
    """The files `logs/attempt_N/NAME.log` of a run directory. A request names attempt and process, never a path."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def listing(self) -> list[dict[str, Any]]:
        """Lists the logs of the newest attempts, the newest first; `now` marks those of the current parts."""
        current = set(current_logs(self._root).values())
        return [
            {"attempt": attempt, "name": name, "bytes": file.stat().st_size, "now": file in current}
            for (attempt, name), file in self._files().items()
        ]

    def part(self, attempt: int, name: str, end: int | None) -> dict[str, Any]:
        """Returns the lines of a log before byte `end` (None: its last ones), in at most PART_BYTES bytes, with the
        place of the first one. Raises RequestRefused."""
        file = self._files().get((attempt, name))
        if file is None:
            raise RequestRefused(
                f"given: the log {name!r} of attempt {attempt}; expected: one that logs/ of the run has; to do: choose "
                "one of the list",
                status=404,
            )
        with file.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            last = size if end is None else min(end, size)
            log.seek(first := max(0, last - PART_BYTES))
            text = log.read(last - first)
        torn = text.find(b"\n", 0, -1) + 1 if first else 0  # a part begins with a whole line, if it holds any
        return {
            "attempt": attempt,
            "name": name,
            "start": first + torn,
            "end": last,
            "bytes": size,
            "text": text[torn:].decode(errors="replace"),
        }

    def _files(self) -> dict[tuple[int, str], Path]:
        """Returns the logs by attempt and name. A link that leads out of the run directory is none."""
        root = self._root.resolve()
        attempts = {}
        for place in (self._root / "logs").glob("attempt_*"):
            if match := re.fullmatch(r"attempt_(\d+)", place.name):
                attempts[int(match[1])] = place
        return {
            (attempt, file.stem): file
            for attempt in sorted(attempts, reverse=True)[:NEWEST_ATTEMPTS]
            for file in sorted(attempts[attempt].glob("*.log"))
            if file.is_file() and file.resolve().is_relative_to(root)
        }


def current_logs(root: Path) -> dict[str, Path]:
    """Returns the log of each process of the newest attempt, and of parts that outlived the attempt that started them,
    as replicas do."""
    attempts = sorted((root / "logs").glob("attempt_*"), key=lambda path: int(path.name.partition("_")[2]))
    logs = [{file.stem: file for file in sorted(attempt.glob("*.log"))} for attempt in attempts]
    status = Status.read(root)
    parts = {part.name for part in status.parts} if status else set()
    older = {name: file for files in logs[:-1] for name, file in files.items() if name in parts}
    return older | (logs[-1] if logs else {})
