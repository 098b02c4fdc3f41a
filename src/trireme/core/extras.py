"""Imports packages that only some commands and environments need, at the time when they are used."""

from __future__ import annotations

import importlib
from typing import Any

from trireme.core.errors import BadInput


def require(module: str, *, extra: str, what_for: str) -> Any:
    """Imports and returns `module`, which belongs to the optional dependencies `extra` of this project.

    Raises BadInput if it is not installed, with the command that installs it; `what_for` names the feature that needs
    it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BadInput(
            f"given: {what_for}, without the package {module.partition('.')[0]} ({error})\n"
            f"  expected: the extra `{extra}`\n"
            f'  to do: uv sync --extra {extra}, or uv pip install "trireme[{extra}]"'
        ) from None
