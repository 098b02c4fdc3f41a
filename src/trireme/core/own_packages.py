"""Has Python find this project's packages next to `trireme`, whatever modules of the same names a user has.

`trainer.py`, `inference.py` and `service.py` are usual names. Where one lies in the working directory or in PYTHONPATH,
Python would find it before the package. `import trireme` in a process is enough: see `trireme/__init__.py`; and
`import _trireme_entry` where `trireme.py` may be a user's.
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
"""The package that a process imports first, because no user's module hides it."""
ROOT = Path(__file__).resolve().parents[2]
"""The directory in which they lie."""


class OwnPackages(MetaPathFinder):
    """Finds the packages OWN_PACKAGES in ROOT, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in OWN_PACKAGES:
            return PathFinder.find_spec(fullname, [str(ROOT)])
        return None


def find_own_first() -> None:
    """Has this process find the project's packages before all else. A second call does nothing."""
    if not any(isinstance(finder, OwnPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnPackages())


def search(directories: Iterable[str]) -> None:
    """Makes this process find a user's modules in `directories`, before installed packages."""
    sys.path[:0] = [directory for directory in directories if directory not in sys.path]


def hidden_modules(directories: Sequence[str]) -> list[str]:
    """Returns messages on the modules in `directories` that the project's packages hide, with the remedy."""
    places = sorted({Path(directory).resolve() for directory in directories} - {ROOT})
    return [
        f"{file} is hidden, as `import {name}` finds Trireme's package: to import yours, give it another name, or put "
        "it into a package of your own"
        for name in OWN_PACKAGES
        for place in places
        for file in (place / f"{name}.py", place / name / "__init__.py")
        if file.is_file()
    ]
