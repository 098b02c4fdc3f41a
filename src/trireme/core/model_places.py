"""Where this process finds the files of models that another node has sent to this one."""

from __future__ import annotations

import json
import os
from pathlib import Path

PLACES = "TRIREME_MODEL_PLACES"
"""The variable that says it, so that processes which this one starts find them too."""


def place_of(name: str) -> str:
    """Returns the directory with the files of the model `name`, a directory or a name on the hub, if they were sent to
    this node; else `name`."""
    return str(_places().get(name, name))


def set_place(name: str, directory: Path) -> None:
    """Makes `place_of` return `directory` for the model `name`, here and in processes that this one starts."""
    os.environ[PLACES] = json.dumps({**_places(), name: str(directory)}, allow_nan=False)


def _places() -> dict[str, str]:
    return dict(json.loads(os.environ.get(PLACES, "{}")))
