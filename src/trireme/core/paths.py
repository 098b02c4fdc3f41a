"""Resolves paths that come from manifests, HEADs, object storage and requests.

Such a path names a file below a directory. Another user may have written it, so only `path_in` may turn it into a place
on disk. A law test lists the exceptions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PureWindowsPath

from trireme.core.errors import CheckpointInvalid

UNUSABLE = re.compile(r"[\0\ud800-\udfff]")
"""Characters that no name of a file can have: NUL, and halves of surrogate pairs."""


def names_of(path: object) -> list[str]:
    """Returns the names that `path` joins by slashes. Raises CheckpointInvalid if `path` is no text, is empty or
    absolute, begins with a drive, or has an empty name, `.` or `..`; backslashes count as slashes in this check."""
    if isinstance(path, str):
        names = re.split(r"[/\\]", path)
    else:
        names = [""]
    if not {"", ".", ".."}.isdisjoint(names) or PureWindowsPath(str(path)).drive or UNUSABLE.search(str(path)):
        raise CheckpointInvalid(
            f"the path {path!r} leads out of its directory, or is no path; expected names joined by slashes"
        )
    return str(path).split("/")


def path_in(directory: Path, path: object) -> Path:
    """Returns `directory` joined with `path`; the file need not exist. Raises CheckpointInvalid if the names in `path`
    lead out of `directory` (`names_of`), or if a part of the path below `directory` is a symbolic link."""
    place = directory
    for name in names_of(path):
        place = place / name
        if os.path.islink(place):
            raise CheckpointInvalid(
                f"{place} is a symbolic link, so {path!r} may lead out of {directory}; expected a plain file or "
                "directory"
            )
    return place
