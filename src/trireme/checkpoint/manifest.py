"""The manifest of a commit. It is written last, and it *is* the commit: what it names must be there, byte for byte.

Its own text is covered too: it holds a checksum over all its values, and only the exact text that this module writes
for them is accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from trireme.checkpoint.files import FileRecord, checksum_of
from trireme.core.errors import CheckpointInvalid
from trireme.core.types import WeightIdentity

FORMAT = 3
MANIFEST = "manifest.json"
THREADS = 8
"""Files whose contents are checked side by side."""


def step_name(step: int) -> str:
    """Name of the directory of the commit of `step`.

    >>> step_name(20)
    'step_000020'
    """
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """The step that a commit's directory is named after; None for any other name."""
    match = re.fullmatch(r"step_(\d{6,})", name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class CommitRef:
    """One commit among all that a run ever made: the commit of `step` that `lineage` wrote."""

    lineage: str
    step: int


@dataclass(frozen=True)
class Manifest:
    """What one commit is and holds.

    `step`: training steps completed, the version of its weights. `parent`: the commit that came before. `identities`:
    of the last K + 1 versions, oldest first, this commit's own last. `shards`, `replicas`: how many there were.
    `fixed`: what a resume may not change (JSON values). `created`: for people, nothing depends on the clock. `files`:
    all but this one.
    """

    step: int
    lineage: str
    parent: CommitRef | None
    attempt: int
    identities: tuple[WeightIdentity, ...]
    shards: int
    replicas: int
    fixed: Mapping[str, Any]
    config_hash: str
    packages: Mapping[str, str]
    created: str
    files: tuple[FileRecord, ...]

    @property
    def identity(self) -> WeightIdentity:
        """Of the weights in this commit."""
        return self.identities[-1]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files)

    def to_json(self) -> str:
        values = {"format": FORMAT, **asdict(self), "identities": [str(i) for i in self.identities]}
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
        values["checksum"] = xxhash.xxh3_128_hexdigest(canonical.encode())
        return json.dumps(values, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest that `to_json` wrote. Raises CheckpointInvalid for any other text."""
        try:
            values = json.loads(text)
            written = values.pop("format")
            if written != FORMAT:
                raise CheckpointInvalid(f"{MANIFEST} has format version {written}, but this program reads {FORMAT}")
            del values["checksum"]
            manifest = cls(
                **{
                    **values,
                    "parent": CommitRef(**values["parent"]) if values["parent"] else None,
                    "identities": tuple(WeightIdentity.parse(label) for label in values["identities"]),
                    "files": tuple(FileRecord(**record) for record in values["files"]),
                }
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointInvalid(f"{MANIFEST} is torn or was altered ({type(error).__name__}: {error})") from None
        if manifest.to_json() != text:
            raise CheckpointInvalid(f"{MANIFEST} was altered: it does not have the checksum that it was written with")
        return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the commit in `directory`. Raises CheckpointInvalid."""
    try:
        text = (directory / MANIFEST).read_bytes().decode()
    except FileNotFoundError:
        raise CheckpointInvalid(f"{MANIFEST} is missing: the commit was never completed") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointInvalid(f"{MANIFEST} cannot be read ({error})") from None
    return Manifest.from_json(text)


def verify(directory: Path, contents: bool = True) -> Manifest:
    """The manifest of the commit in `directory`, all of whose files are there with their sizes and, with `contents`,
    their checksums. Raises CheckpointInvalid, which names the file and what is wrong with it."""
    manifest = read_manifest(directory)
    if step_of(directory.name) not in (None, manifest.step):
        raise CheckpointInvalid(f"{MANIFEST} is of step {manifest.step}, in a directory named {directory.name}")
    for record in manifest.files:
        _check_size(directory, record)
    if contents:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda record: _check_contents(directory, record), manifest.files):
                pass
    return manifest


def _check_size(directory: Path, record: FileRecord) -> None:
    try:
        size = (directory / record.path).stat().st_size
    except FileNotFoundError:
        raise CheckpointInvalid(f"{record.path} is missing") from None
    except OSError as error:
        raise CheckpointInvalid(f"{record.path} cannot be read ({error.strerror})") from None
    if size != record.size:
        raise CheckpointInvalid(f"{record.path} has {size} bytes, it was written with {record.size}")


def _check_contents(directory: Path, record: FileRecord) -> None:
    try:
        checksum = checksum_of(directory / record.path)
    except OSError as error:
        raise CheckpointInvalid(f"{record.path} cannot be read ({error.strerror})") from None
    if checksum != record.checksum:
        raise CheckpointInvalid(
            f"the contents of {record.path} were altered: checksum {checksum}, it was written with {record.checksum}"
        )
