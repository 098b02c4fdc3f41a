"""Nodes that do not see the run directory, as directories of this machine: each has a disk of its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_support import fill, manifest
from store_support import Driver

from trireme.checkpoint.manifest import MANIFEST, Manifest
from trireme.checkpoint.parts import CheckpointSource
from trireme.launch import writers
from trireme.launch.writers import FarNodes

PARTS = {"near": ("inference",), "far": ("trainer",), "farther": ("orchestrator",)}
"""The parts of a checkpoint that each node writes; near is the driver's."""


class FarRun:
    """A driver with its disk `near`, and two nodes with others, by Ray's calls as they are without Ray."""

    def __init__(self, url: str, disks: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
        self.driver = Driver(url, disks / "near", *flags).claim()
        self.disks, self.root, self.mirror = disks, self.driver.run.root, self.driver.mirror
        self.run = replace(self.driver.run, mirror=self.mirror)
        self.far = FarNodes(self.run, self.mirror, {name: f"host-{name}" for name in PARTS if name != "near"}, 30.0)

        def options(function: Callable[..., Any]) -> Callable[..., Any]:
            def on(scheduling_strategy: str) -> Any:
                def remote(url: str, key: str, draft: Path, files: Any) -> Any:
                    return function(url, key, self.at(scheduling_strategy, draft), files)

                return SimpleNamespace(remote=remote)

            return on

        monkeypatch.setattr(
            writers.ray, "remote", lambda **_: lambda function: SimpleNamespace(options=options(function))
        )
        monkeypatch.setattr(writers, "on_node", lambda node: node)
        monkeypatch.setattr(writers.waits, "get_all", lambda refs, **_: refs)

    def at(self, node: str, path: Path) -> Path:
        """The place of a path of the run directory on a node's disk."""
        return self.disks / node / path.relative_to(self.disks / "near")

    def write(self, step: int) -> tuple[Path, Manifest]:
        draft, head = self.run.store.draft(step, self.run.start.attempt), self.run.head
        filled = fill(draft, manifest(step, head.lineage, head.attempt), state=step)
        for node, parts in PARTS.items():
            for part in parts if node != "near" else ():
                self.at(node, draft).mkdir(parents=True, exist_ok=True)
                (draft / part).rename(self.at(node, draft) / part)
        return draft, filled

    def checkpoint(self, step: int) -> Path:
        draft, filled = self.write(step)
        self.far.gather(draft, filled)
        return self.run.store.publish(draft, filled)

    def source(self, checkpoint: Path) -> CheckpointSource:
        """The checkpoint for a node that does not see the run directory, once the store has it."""
        source = self.far.source(checkpoint, Manifest.read(checkpoint))
        return replace(source, mark=self.disks / "nowhere")

    def leftovers(self) -> list[Path]:
        """All files below the directories of checkpoints on the disks of the other nodes."""
        return [file for node in self.far.nodes for file in (self.disks / node).rglob("*") if file.is_file()]


def puts(requests: list[str]) -> list[str]:
    """The files of checkpoints, manifests apart, that were put, in order of time."""
    paths = [
        request.split("/commits/")[1] for request in requests if request.startswith("PUT") and "/commits/" in request
    ]
    return [path for path in paths if not path.endswith(MANIFEST)]
