"""Files that grow on another machine, logs and traces, and their copies in the run directory. Moves no bytes.

A process appends to `logs/attempt_N/<name>.log` and `trace/attempt_N/<name>.json` on its own machine. What is new there
is appended here to the file of the same name: that of a replica whose successor runs elsewhere has parts of both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trireme.checkpoint.files import storage_errors

PART_BYTES = 4 << 20
"""Most bytes of a file that are sent at once; the rest follows."""
KINDS = {"logs": ".log", "trace": ".json"}
"""The directories of a run in which each attempt has a directory with a file for each process, and how their names
end."""


@dataclass(frozen=True)
class GrownFile:
    """A part by which a file has grown."""

    path: str
    """Relative to the run directory."""
    offset: int
    """Where the new part begins."""
    contents: bytes
    """The new part."""

    @property
    def end(self) -> int:
        """Where the next part begins."""
        return self.offset + len(self.contents)


def grown(root: Path, known: Mapping[str, int], first_attempt: int, part_bytes: int = PART_BYTES) -> list[GrownFile]:
    """Returns what the files of processes below `root` have more than `known`, {path: size}; those of attempts before
    the first one of this command are left out. Raises OSError."""
    found = []
    for file in sorted(file for kind, end in KINDS.items() for file in root.glob(f"{kind}/attempt_*/*{end}")):
        attempt = re.fullmatch(r"attempt_(\d+)", file.parent.name)
        if not attempt or int(attempt[1]) < first_attempt:
            continue
        path = str(file.relative_to(root))
        with file.open("rb") as stream:
            stream.seek(offset := known.get(path, 0))
            if contents := stream.read(part_bytes):
                found.append(GrownFile(path, offset, contents))
    return found


def append(root: Path, part: GrownFile) -> None:
    """Appends a part to the file of this name below `root`. The trace of a process that continues that of another one
    becomes a part of the same JSON array. Raises StorageFailed."""
    file, contents = root / part.path, part.contents
    if Path(part.path).parts[0] not in KINDS or ".." in Path(part.path).parts:
        raise ValueError(f"{part.path} is no log and no trace")
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as stream:
            if part.offset == 0 and file.suffix == ".json" and os.fstat(stream.fileno()).st_size:
                contents = b"\n," + contents.removeprefix(b"[")
            stream.write(contents)
