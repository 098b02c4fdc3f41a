"""The manifest of a checkpoint. It is written last, and it *is* the checkpoint: every file that the manifest names must
be there, unaltered.

The manifest's text is protected, too: it holds a checksum of all values in it, and only the exact text that this module
writes for these values is accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from trireme.checkpoint.files import FileRecord, checksum_of
from trireme.core.errors import CheckpointInvalid
from trireme.core.paths import path_in
from trireme.core.types import WeightIdentity

FORMAT = 5
"""The format of a checkpoint. A change of the manifest, or of the digests' formula, needs a new number, and a new
fixture (tests/e2e/checkpoint_fixture.py)."""
MANIFEST = "manifest.json"
THREADS = 8
"""Number of files to check in parallel."""


def step_name(step: int) -> str:
    """Returns the name of the directory of the checkpoint of `step`.

    >>> step_name(20)
    'step_000020'
    """
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """Returns the step that a checkpoint's directory is named after; None for any other name."""
    match = re.fullmatch(r"step_(\d{6,})", name)
    if match:
        return int(match[1])
    return None


@dataclass(frozen=True)
class CheckpointRef:
    """Names one checkpoint among all that a run ever made."""

    lineage: str  # the lineage that wrote it
    step: int


@dataclass(frozen=True)
class Manifest:
    """Describes one checkpoint: the run's state that it holds, how it came about, and its files."""

    step: int  # training steps completed: the version of its weights
    lineage: str  # the lineage that wrote it, 8 hex digits
    parent: CheckpointRef | None  # the checkpoint before it
    attempt: int  # the attempt that wrote it
    identities: tuple[WeightIdentity, ...]  # of the last max_steps_off_policy + 1 versions, oldest first, its own last
    shards: int  # number of trainer processes
    replicas: int  # number of inference replicas
    fixed: Mapping[str, object]  # JSON values that a resume may not change
    decided: Mapping[str, object]  # what keys with the value auto meant, by key: a resume keeps it
    config_hash: str  # hash of the resolved configuration
    packages: Mapping[str, str]  # versions of the packages that matter
    created: str  # time for people; nothing depends on it
    files: tuple[FileRecord, ...]  # all files but the manifest

    @property
    def identity(self) -> WeightIdentity:
        """The identity of the weights in this checkpoint."""
        return self.identities[-1]

    @property
    def size(self) -> int:
        """Number of bytes of all files of the checkpoint together, without the manifest."""
        return sum(record.size for record in self.files)

    def to_json(self) -> str:
        values = {"format": FORMAT, **asdict(self), "identities": [str(i) for i in self.identities]}
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
        values["checksum"] = xxhash.xxh3_128_hexdigest(canonical.encode())
        return json.dumps(values, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parses the text that `to_json` wrote. Raises CheckpointInvalid for any other text."""
        try:
            values = json.loads(text)
            written = values.pop("format")
            if written != FORMAT:
                raise CheckpointInvalid(
                    f"{MANIFEST} has format {written}; expected {FORMAT}: resume with the version of Trireme that "
                    "wrote the checkpoint, or begin a new run"
                )
            del values["checksum"]
            manifest = cls(
                **{
                    **values,
                    "parent": CheckpointRef(**values["parent"]) if values["parent"] else None,
                    "identities": tuple(WeightIdentity.parse(label) for label in values["identities"]),
                    "files": tuple(FileRecord(**record) for record in values["files"]),
                }
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointInvalid(f"{MANIFEST} is torn or was altered ({type(error).__name__}: {error})") from None
        if manifest.to_json() != text:
            raise CheckpointInvalid(f"{MANIFEST} was altered: it does not have the checksum that it was written with")
        return manifest

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Reads the manifest of the checkpoint in `directory`. Raises CheckpointInvalid."""
        try:
            text = (directory / MANIFEST).read_bytes().decode()
        except FileNotFoundError:
            raise CheckpointInvalid(f"{MANIFEST} is missing: the checkpoint was never completed") from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointInvalid(f"{MANIFEST} cannot be read ({error})") from None
        return cls.from_json(text)

    @classmethod
    def verified(cls, directory: Path, contents: bool = True) -> Manifest:
        """Reads the manifest of the checkpoint in `directory` and checks the sizes of its files and, with `contents`,
        their checksums. Raises CheckpointInvalid, which names the file and its fault."""
        manifest = cls.read(directory)
        if step_of(directory.name) not in (None, manifest.step):
            raise CheckpointInvalid(f"{MANIFEST} is of step {manifest.step}, in a directory named {directory.name}")
        for record in manifest.files:
            _check_file(directory, record, contents=False)
        if contents:
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda record: _check_file(directory, record, contents=True), manifest.files))
        return manifest


def _check_file(directory: Path, record: FileRecord, contents: bool) -> None:
    file = path_in(directory, record.path)
    try:
        size = file.stat().st_size
        if contents:
            checksum = checksum_of(file)
        else:
            checksum = record.checksum
    except FileNotFoundError:
        raise CheckpointInvalid(f"{record.path} is missing") from None
    except OSError as error:
        raise CheckpointInvalid(f"{record.path} cannot be read ({error.strerror})") from None
    if size != record.size:
        raise CheckpointInvalid(f"{record.path} has {size} bytes, it was written with {record.size}")
    if checksum != record.checksum:
        raise CheckpointInvalid(
            f"the contents of {record.path} were altered: their checksum is {checksum}, expected {record.checksum}"
        )
