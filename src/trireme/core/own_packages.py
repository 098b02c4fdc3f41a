"""Makes Python find this project's packages next to `trireme`, even if a user has modules with the same names.

`trainer.py`, `inference.py` and `service.py` are usual names. If one lies in the working directory or in PYTHONPATH,
Python would import it instead of the package. `import trireme` in a process is enough to prevent this (see
`trireme/__init__.py`). If a user may also have a `trireme.py`, a process has to `import _trireme_entry`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

OWN_PACKAGES = ("trireme", "trainer", "orchestrator", "inference", "service")
"""The packages of this project."""
ENTRY = "_trireme_entry"
"""The package that a process imports first, because no user's module has the same name."""
ROOT = Path(__file__).resolve().parents[2]
"""The directory in which all these packages lie."""


class OwnPackages(MetaPathFinder):
    """An import finder that finds the packages OWN_PACKAGES in the directory ROOT, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in OWN_PACKAGES:
            return PathFinder.find_spec(fullname, [str(ROOT)])
        return None


def find_own_first() -> None:
    """Makes each import in this process look for the project's packages first, so that a user's module with the same
    name is not imported instead. A second call does nothing."""
    if not any(isinstance(finder, OwnPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnPackages())


def search(directories: Iterable[str]) -> None:
    """Adds `directories` at the beginning of `sys.path`, except directories that are in it already. This process then
    looks for modules there before it looks among installed packages."""
    sys.path[:0] = [directory for directory in directories if directory not in sys.path]


def hidden_modules(directories: Sequence[str]) -> list[str]:
    """Returns a message for each module in `directories` that cannot be imported because a package of this project has
    the same name. The message says how to fix it."""
    places = sorted({Path(directory).resolve() for directory in directories} - {ROOT})
    return [
        f"{file} is hidden, as `import {name}` finds Trireme's package: to import yours, give it another name, or put "
        "it into a package of your own"
        for name in OWN_PACKAGES
        for place in places
        for file in (place / f"{name}.py", place / name / "__init__.py")
        if file.is_file()
    ]
