"""A run in object storage: its HEAD there, and the keys of the objects that HEAD names. This module sends no requests.

    HEAD                                           the run, its driver, its checkpoints and files; put only if unchanged
    commits/000002/step_000020-<lineage>-1/...     files of a checkpoint that driver 2 put in attempt 1
    rows/000002/metrics.jsonl/000000-<checksum>    a part of a file that belongs to no checkpoint

HEAD decides: an object counts once HEAD names it, and HEAD is put after everything that it names. The name of an object
contains the number of its driver, so no driver overwrites an object of another. An object is deleted only when HEAD no
longer names it; an object that no HEAD ever named, such as a part of an incomplete checkpoint, is deleted later. So a
crash between any two puts leaves the run as the last HEAD says, and a superseded driver changes nothing that the HEAD
of the new driver names. When checkpoints and rows move to `branches/`, HEAD gives them another path, and the objects
stay where they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import xxhash
from pydantic import TypeAdapter

from trireme.checkpoint.manifest import Manifest, step_name, step_of
from trireme.checkpoint.store import CHECKPOINTS, Head
from trireme.core.errors import CheckpointInvalid
from trireme.core.finite_json import to_json
from trireme.core.paths import names_of

FORMAT = 1
PART_BYTES = 4 << 20
"""Size of the parts of a file; only its last one is shorter, and is put again when the file has grown."""
COMMITS = "commits"
ROWS = "rows"


@dataclass(frozen=True)
class StoredCheckpoint:
    """Where a checkpoint is in object storage."""

    key: str
    """The checkpoint's files, also its manifest, have the keys `key`/<path>."""
    manifest: str
    """The checksum of the manifest's text."""
    kept: bool = False
    """True: the checkpoint has a file KEEP, because something else refers to it (`checkpoint.store.KEEP`)."""


class FilePart(NamedTuple):
    """A part of a file in object storage: PART_BYTES, or less at the end of the file."""

    driver: int
    """The number of the driver that put the part."""
    size: int
    checksum: str


@dataclass(frozen=True)
class StoredRun:
    """The contents of HEAD in object storage: the run's driver, checkpoints and files."""

    driver: int
    """The number of the driver that wrote this HEAD; drivers of a run count from 1."""
    token: str
    """A random text that the driver has chosen, so that no two drivers write equal HEADs."""
    holder: str
    """The driver's process, for messages: "pid 123 on HOST"."""
    head: Head
    """The contents of the file HEAD in the run directory."""
    written: int = 0
    """How many HEADs this driver has put, so that no two of them are equal."""
    commits: Mapping[str, StoredCheckpoint] = field(default_factory=dict)
    """{path in the run directory: where the checkpoint with this path is in object storage}."""
    files: Mapping[str, tuple[FilePart, ...]] = field(default_factory=dict)
    """{path in the run directory: the parts of this file}, for all files that belong to no checkpoint."""

    def to_json(self) -> bytes:
        return to_json({"format": FORMAT, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> StoredRun:
        """Parses the output of `to_json`. Raises CheckpointInvalid for any other text."""
        try:
            values = json.loads(text)
            written = values.pop("format")
            if written != FORMAT:
                raise CheckpointInvalid(
                    f"HEAD has format {written}; expected {FORMAT}: use the version of Trireme that wrote it, or "
                    "another run.output_dir"
                )
            stored = TypeAdapter(cls).validate_python(values)
            for path in (stored.head.lineage, *stored.commits, *stored.checkpoint_keys(), *stored.files):
                names_of(path)
        except (ValueError, TypeError, KeyError, AttributeError, CheckpointInvalid) as error:
            raise CheckpointInvalid(f"HEAD is damaged ({type(error).__name__}: {error})") from None
        return stored

    def of_branch(self) -> dict[int, str]:
        """Returns {step: path in the run directory} of the run's current checkpoints, in order of step. Superseded
        checkpoints (in `branches/`) are not current."""
        below = f"{CHECKPOINTS}/"
        steps = {path: step_of(path.removeprefix(below)) for path in self.commits if path.startswith(below)}
        return dict(sorted((step, path) for path, step in steps.items() if step is not None))

    def parts(self) -> set[str]:
        """Returns the keys of all parts of all files that HEAD names."""
        return {part_key(path, number, part) for path, parts in self.files.items() for number, part in enumerate(parts)}

    def checkpoint_keys(self) -> set[str]:
        return {checkpoint.key for checkpoint in self.commits.values()}


def part_key(path: str, number: int, part: FilePart) -> str:
    """Returns the key of `part`, the part with index `number` of the file `path`."""
    return f"{ROWS}/{part.driver:06d}/{path}/{number:06d}-{part.checksum}"


def checkpoint_key(driver: int, manifest: Manifest) -> str:
    """Returns the key below which the driver with this number puts the files of the checkpoint of `manifest`."""
    return f"{COMMITS}/{driver:06d}/{step_name(manifest.step)}-{manifest.lineage}-{manifest.attempt}"


def writer_of(key: str) -> tuple[int, int] | None:
    """Returns (number of the driver, attempt) that put the object at `key`. The attempt is 0 for a part of a file,
    because the key of a part does not name the attempt. Returns None for a key of another form."""
    words = key.split("/")
    if len(words) < 3 or words[0] not in (COMMITS, ROWS) or not words[1].isdecimal():
        return None
    if words[0] == COMMITS:
        attempt = words[2].rpartition("-")[2]
    else:
        attempt = "0"
    if attempt.isdecimal():
        return (int(words[1]), int(attempt))
    return None


def part_of(block: bytes, driver: int, previous: FilePart | None) -> FilePart:
    """Returns the part with the contents `block`: `previous` if it has the same size and checksum, else a new part of
    `driver`."""
    part = FilePart(driver, len(block), xxhash.xxh3_128_hexdigest(block))
    if previous and (previous.size, previous.checksum) == (part.size, part.checksum):
        return previous
    return part


def elsewhere(
    stored: StoredRun, head: Head, local: Mapping[str, StoredCheckpoint], keep_last: int, keep_every: int | None
) -> dict[str, StoredCheckpoint]:
    """Returns {path: checkpoint} of the checkpoints that the run directory does not have, but that stay in object
    storage.

    `stored`: the contents of HEAD in the store. `head`: HEAD of the run directory. `local`: {path: checkpoint} of the
    run directory's checkpoints. `keep_last` and `keep_every` decide which current checkpoints (not in `branches/`)
    stay, as in `CheckpointStore.prune`. If the run has gone back to an earlier step, later checkpoints get a path below
    `branches/<lineage>/`, with the lineage that the run left.
    """
    alone: dict[str, StoredCheckpoint] = {}
    on_branch: dict[int, str] = {}
    checksums = {checkpoint.manifest for checkpoint in local.values()}
    steps = {path: n for n, path in stored.of_branch().items()}
    has_left = head.lineage != stored.head.lineage
    base = head.base.step if head.base else -1
    for path, checkpoint in stored.commits.items():
        step = steps.get(path)
        if checkpoint.manifest in checksums:
            continue
        if step is None:
            alone[path] = checkpoint
        elif has_left and step > base:
            alone[f"branches/{stored.head.lineage}/{path}"] = checkpoint
        elif path not in local:
            alone[path] = checkpoint
            on_branch[step] = path
    all_steps = sorted({*on_branch, *replace(stored, commits=local).of_branch()})
    for step, path in on_branch.items():
        is_old = step not in all_steps[-keep_last:] and not (keep_every and step % keep_every == 0)
        if is_old and not alone[path].kept:
            del alone[path]
    return alone
