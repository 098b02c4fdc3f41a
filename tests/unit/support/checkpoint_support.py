"""Small checkpoints, ways to damage them, and crashes at any change of the file system."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import xxhash

from trireme.checkpoint.files import FileRecord, HashingWriter, write_bytes
from trireme.checkpoint.manifest import MANIFEST, CheckpointRef, Manifest
from trireme.checkpoint.store import CheckpointStore
from trireme.core.types import WeightIdentity

FIXED = {"model": {"hidden_size": 64}, "loss": {"loss_fn": "ppo"}}
PARTS = ("trainer/__0_0.distcp", "orchestrator/state.json", "inference/model.safetensors")
"""A file of each room; the manifest is the fourth kind."""
CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "link")
"""What changes a file system, apart from writing to a file."""


class Crash(BaseException):
    """The process ends here."""


class Crashing:
    """Counts changes of the file system; the one with number `at` does not happen, it raises Crash.

    A write that crashes leaves half of its bytes.
    """

    def __init__(self, at: int | None) -> None:
        self.at, self.count = at, 0

    def due(self) -> bool:
        self.count += 1
        return self.count == self.at

    def instead_of(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **options: Any) -> Any:
            if self.due():
                raise Crash(f"{change}{args}")
            return change(*args, **options)

        return changed

    def write(self, writer: HashingWriter, chunk: bytes) -> int:
        if self.due():
            self.real_write(writer, chunk[: len(chunk) // 2])
            writer._write(writer._blocks[0][: writer._filled], 0)
            raise Crash("write")
        return self.real_write(writer, chunk)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.real_write = HashingWriter.write
        changes: dict[str, Any] = {name: self.instead_of(getattr(os, name)) for name in CHANGES}

        def write(writer: HashingWriter, chunk: bytes) -> int:
            return self.write(writer, chunk)

        with mock.patch.multiple(os, **changes), mock.patch.object(HashingWriter, "write", write):
            yield


@contextmanager
def crash_at(change: int | None) -> Iterator[None]:
    """Crashes at that change of the file system (counted from 1) that happens in the block, if there are as many."""
    with Crashing(change)():
        yield


def crashes(change: int, work: Callable[[], Any]) -> bool:
    """Returns True if `work` crashed at that change, and False if it ended before."""
    try:
        with crash_at(change):
            work()
    except Crash:
        return True
    return False


def fill(draft: Path, manifest: Manifest, state: Any = None) -> Manifest:
    """Writes a file of each room into `draft`; the manifest with their records."""
    records = []
    for part in PARTS:
        directory, name = part.split("/")
        contents = json.dumps({"state": state, "of": part, "step": manifest.step}).encode()
        records.append(write_bytes(draft / directory, name, contents))
    return replace(manifest, files=tuple(records))


def manifest(step: int, lineage: str = "aaaaaaaa", attempt: int = 1, parent: CheckpointRef | None = None) -> Manifest:
    return Manifest(
        step=step,
        lineage=lineage,
        parent=parent,
        attempt=attempt,
        identities=tuple(WeightIdentity(attempt, v, f"{v:032x}") for v in (step - 1, step)),
        shards=2,
        replicas=1,
        fixed=FIXED,
        decided={},
        config_hash="0123456789abcdef",
        packages={"torch": "2.13.0"},
        created="2026-01-01T00:00:00+00:00",
        files=(),
    )


def checkpoint(store: CheckpointStore, step: int, attempt: int = 1, state: Any = None) -> Path:
    head = store.head()
    draft = store.draft(step, attempt)
    filled = fill(draft, manifest(step, head.lineage if head else "aaaaaaaa", attempt), state)
    return store.publish(draft, filled)


def names(store: CheckpointStore) -> list[str]:
    return [path.name for path in store.checkpoints()]


def steps(store: CheckpointStore) -> list[int]:
    return [int(name.removeprefix("step_")) for name in names(store)]


def flip(file: Path, byte: int | None = None, bit: int = 0) -> None:
    """Flips one bit, by default of the byte in the middle."""
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2 if byte is None else byte] ^= 1 << bit
    file.write_bytes(contents)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def append_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    with file.open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def snapshot(root: Path) -> dict[str, bytes]:
    """All files under `root`."""
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def forge(checkpoint: Path, path: str, data: bytes) -> None:
    """Puts `data` in the place of a file of a checkpoint, as a stranger may who writes a manifest that fits."""
    (checkpoint / path).write_bytes(data)
    before = Manifest.read(checkpoint)
    record = FileRecord(path, len(data), xxhash.xxh3_128_hexdigest(data))
    files = tuple(record if file.path == path else file for file in before.files)
    (checkpoint / MANIFEST).write_text(replace(before, files=files).to_json())
