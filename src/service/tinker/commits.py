"""The directories in which a server saves models for itself. One of each model counts: that which the store names."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from trireme.core.paths import path_in


class OwnCommits:
    """All of them, below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._writing = ""

    def directory(self, place: str) -> Path:
        """Returns the directory of this name. Raises CheckpointInvalid for a name that leads elsewhere."""
        return path_in(self._root, place)

    def begin(self, model_id: str, seq: int) -> str:
        """Returns the name of a new directory for a model's state before its request `seq`."""
        self._writing = f"{model_id.replace(':', '-')}-{seq}"
        self._root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.directory(self._writing), ignore_errors=True)
        return self._writing

    def remove(self, retained: Collection[str]) -> None:
        """Removes all commits except `retained` and the one that may be in writing."""
        for directory in self._root.glob("*"):
            if directory.name not in retained and directory.name != self._writing:
                shutil.rmtree(directory, ignore_errors=True)
