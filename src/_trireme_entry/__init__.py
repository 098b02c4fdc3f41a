"""Imports `trireme` from the directory in which this package lies: the one module of the project that no user's module
hides. Each process that the project starts imports this first, because a `trireme.py` in the working directory or in
PYTHONPATH would come before the package.

    python -m _trireme_entry MODULE ...     runs a module of the project
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import trireme  # noqa: F401

del sys.path[0]
