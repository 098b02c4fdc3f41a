"""Stand-ins for nodes that do not see the run directory: other directories, and calls that run at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from trireme.checkpoint.store import STAGING
from trireme.core.errors import RoomFailed
from trireme.launch.gathering import FarNode, FarNodes
from trireme.launch.node_files import NodeFiles
from trireme.process import waits


@dataclass
class Disk:
    """The disk of one node: what the driver calls `root` is the directory `own` there."""

    root: Path
    own: Path
    calls: list[str] = field(default_factory=list)
    lost_at: int | None = None
    """The number of the call that finds the node lost, and each one after it."""
    started: int = 0

    def start(self, _node: str) -> Any:
        self.started += 1
        return Actor(self, NodeFiles())

    def here(self, value: Any) -> Any:
        return self.own / value.relative_to(self.root) if isinstance(value, Path) else value

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        self.calls.append(method.__name__)
        if self.lost_at is not None and len(self.calls) >= self.lost_at:
            raise RoomFailed("the node was lost")
        return method(*map(self.here, args))


@dataclass
class Actor:
    disk: Disk
    files: NodeFiles

    def __getattr__(self, name: str) -> Any:
        return Remote(partial(self.disk.call, getattr(self.files, name)))


@dataclass
class Remote:
    work: Callable[..., Any]

    def remote(self, *args: Any) -> Callable[[], Any]:
        """Does the work now; who waits for it gets its value or its error."""
        try:
            value = self.work(*args)
        except Exception as error:
            return partial(_raise, error)
        return lambda: value


def _raise(error: Exception) -> None:
    raise error


def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.nice", lambda _: 0)
    monkeypatch.setattr(waits, "get", lambda ref, **_: ref())
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "kill", lambda _: None)


def far_nodes(root: Path, *rooms: tuple[str, ...]) -> tuple[FarNodes, list[Disk]]:
    """A node for each tuple of rooms, each with a directory of its own in place of `root`."""
    disks = [Disk(root, root.parent / f"node_{number}") for number, _ in enumerate(rooms)]
    for disk in disks:
        disk.own.mkdir()
        (disk.own / STAGING).touch()
    nodes = [FarNode(f"id{n}", f"far{n}", each, disks[n].start) for n, each in enumerate(rooms)]
    return FarNodes(nodes), disks
