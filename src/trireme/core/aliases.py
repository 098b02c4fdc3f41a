"""Keeps the import paths that modules had before, for one release: an import of one gives the module, and a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ALIASES = {
    "trireme.cluster": "trireme.process.ray_cluster",
    "trireme.datum": "trireme.core.datum",
    "trireme.environ": "trireme.process.environ",
    "trireme.errors": "trireme.core.errors",
    "trireme.loop": "trireme.api",
    "trireme.protocols": "trireme.core.sampler",
    "trireme.rollouts": "trireme.run.rollout_records",
    "trireme.stopping": "trireme.core.stop_strings",
    "trireme.tokenizer": "trireme.core.tokenizer",
    "trireme.types": "trireme.core.types",
    "trireme.waits": "trireme.process.waits",
    "trireme.weights": "trireme.core.weights",
    "trainer.group": "trainer.handle",
    "trainer.hugging_face": "trainer.export",
    "inference.group": "inference.handle",
    "inference.replica": "inference.actor",
    "orchestrator.data": "orchestrator.advantages",
    "orchestrator.records": "orchestrator.recorder",
}
"""Old path: new path. Only what loops and environments outside this repository import."""


class AliasFinder(MetaPathFinder, Loader):
    """Finds a module under its old path. Both paths then name the same module object."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in ALIASES else None

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module of the new path where the import system looks for the old one."""
        name = module.__name__
        new = ALIASES[name]
        warnings.warn(f"{name} is now {new}; the old path goes with the next release", DeprecationWarning, stacklevel=2)
        sys.modules[name] = import_module(new)
