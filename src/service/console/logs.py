"""The logs of a run, for the console: a part of a file at a time, from its end."""

from __future__ import annotations

import os
import re
from pathlib import Path

from service.console.tokens import missing
from trireme.supervision.status import Status

PART_BYTES = 64 << 10
NEWEST_ATTEMPTS = 20


class RunLogs:
    """The files `logs/attempt_N/NAME.log` of a run directory. A request names attempt and process, never a path."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def listing(self) -> list[dict[str, object]]:
        """Lists the logs of the newest attempts, newest attempt first, with name and size in bytes. The field `now` is
        False for a log that the console marks as earlier. It is True for all logs of the newest attempt. If the file
        STATUS names a process that has no log of that attempt (such as a replica that an earlier attempt started and
        that still runs), `now` is also True for the newest log of this process."""
        files = self._files()
        status = Status.read(self._root)
        if status:
            current = {part.name for part in status.parts}
        else:
            current = set()
        current |= {name for attempt, name in files if attempt == next(iter(files))[0]}
        entries = []
        for (attempt, name), file in files.items():
            entries.append({"attempt": attempt, "name": name, "bytes": file.stat().st_size, "now": name in current})
            current.discard(name)
        return entries

    def part(self, attempt: int, name: str, end: int | None) -> dict[str, object]:
        """Returns a part of a log: the field `text` has the lines that end before byte `end` (None: the last lines), at
        most PART_BYTES bytes; the field `start` is the byte at which this text begins. Raises RequestRefused if there
        is no such log."""
        file = self._files().get((attempt, name))
        if file is None:
            raise missing(f"the log {name!r} of attempt {attempt}", "one that logs/ of the run has")
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
        """Returns {(attempt, name): file} for the logs of the newest attempts. Links to files outside of the run
        directory are left out."""
        root = self._root.resolve()
        attempts = {}
        for place in (self._root / "logs").glob("attempt_*"):
            match = re.fullmatch(r"attempt_(\d+)", place.name)
            if match:
                attempts[int(match[1])] = place
        return {
            (attempt, file.stem): file
            for attempt in sorted(attempts, reverse=True)[:NEWEST_ATTEMPTS]
            for file in sorted(attempts[attempt].glob("*.log"))
            if file.is_file() and file.resolve().is_relative_to(root)
        }
