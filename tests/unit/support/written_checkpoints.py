"""Stand-ins for the rooms that have a part in each checkpoint."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.core.types import WeightIdentity


@dataclass
class Written:
    """Stands for a room's `Pending`: `gate` holds it back, and it raises `error`."""

    path: Path
    gate: threading.Event
    error: Exception | None = None

    def wait(self, timeout_s: float) -> list[FileRecord]:
        assert self.gate.wait(timeout_s)
        if self.error:
            raise self.error
        return [write_bytes(self.path, "part", self.path.name.encode())]


@dataclass
class Room:
    gate: threading.Event = field(default_factory=threading.Event)
    errors: list[Exception | None] = field(default_factory=list)
    """Of the next parts, in order; None: it is written."""
    calls: list[str] = field(default_factory=list)

    def save_state(self, path: Path) -> Any:
        self.calls.append(path.name)
        return Written(path, self.gate, self.errors.pop(0) if self.errors else None)

    def save_weights(self, path: Path, _published: Any) -> Any:
        return self.save_state(path)

    def publish_weights(self, version: int) -> Any:
        self.calls.append(f"publish {version}")
        return weights(version)


def weights(version: int, digest: str | None = None) -> Any:
    return SimpleNamespace(identity=WeightIdentity(1, version, digest or f"{version:032x}"))
