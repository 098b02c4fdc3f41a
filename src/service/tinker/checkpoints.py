"""The directories in which the server saves checkpoints of models for itself. For each model, the only valid directory
is the one that the store names."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from trireme.core.paths import path_in


class OwnCheckpoints:
    """Makes and removes the server's own checkpoints of models, each a directory below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._writing = ""

    def directory(self, place: str) -> Path:
        """Returns the directory of the checkpoint `place`. Raises CheckpointInvalid for a name that leads out of
        `root`."""
        return path_in(self._root, place)

    def begin(self, model_id: str, seq: int) -> str:
        """Begins a checkpoint of the state that a model has before its request number `seq` is run. Removes an
        unfinished directory of the same name. Returns the name of the directory to write."""
        self._writing = f"{model_id.replace(':', '-')}-{seq}"
        self._root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.directory(self._writing), ignore_errors=True)
        return self._writing

    def remove(self, retained: Collection[str]) -> None:
        """Removes all checkpoints except `retained` and the one that was begun last, which may still be written."""
        for directory in self._root.glob("*"):
            if directory.name not in retained and directory.name != self._writing:
                shutil.rmtree(directory, ignore_errors=True)
