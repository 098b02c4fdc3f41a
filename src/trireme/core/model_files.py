"""The files of a model: where this machine has them, which of them travel to other nodes, and how two copies are told
apart within a second."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash
from huggingface_hub import try_to_load_from_cache

from trireme.core.base_digest import INDEX, SINGLE
from trireme.core.tokenizer import looks_like_path

WHOLE_BYTES = 2**22
"""Files up to this size are compared by all of their bytes, larger ones by their size and pieces of them."""
PIECES, PIECE_BYTES = 16, 2**16
CONFIG = "config.json"
TOKENIZER = (CONFIG, "tokenizer.json", "tokenizer_config.json")
"""Files of which a directory with a model or a tokenizer has one."""
TRAVEL = frozenset({".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken"})
"""The ends of names of files that hold weights, a configuration or a tokenizer. No code travels, and no format of
weights that can run code."""


def model_directory(name: str, marks: Sequence[str] = (CONFIG,)) -> Path | None:
    """Returns where this node has a model, a directory or a name on the hub, which has one of the files `marks`; None
    if it has none."""
    if looks_like_path(name):
        directory = Path(name).expanduser()
        return directory if any((directory / mark).is_file() for mark in marks) else None
    found = (try_to_load_from_cache(name, mark) for mark in marks)
    return next((Path(file).parent for file in found if isinstance(file, str)), None)


def lacks_weights(directory: Path) -> list[str]:
    """Returns the safetensors files that a model's directory should have and has not, as its index names them."""
    index = directory / INDEX
    names = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else {SINGLE}
    return sorted(name for name in names if not (directory / name).is_file())


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model that travel, by name."""

    sizes: Mapping[str, int]
    """Bytes of each."""
    digests: Mapping[str, str]
    """A digest of each, of its size and of pieces if it is large."""

    @classmethod
    def of(cls, directory: Path) -> ModelFiles:
        """Looks at a directory. Raises OSError."""
        files = sorted(file for file in directory.iterdir() if file.suffix in TRAVEL and file.is_file())
        files = [file for file in files if not file.name.startswith(".")]
        return cls({file.name: file.stat().st_size for file in files}, {file.name: _digest(file) for file in files})

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(self.sizes.values())

    @property
    def digest(self) -> str:
        """Names these files: 32 hex digits."""
        return xxhash.xxh3_128_hexdigest(json.dumps(sorted(self.digests.items()), allow_nan=False).encode())


def sendable(names: Sequence[str], weights: str) -> dict[str, Path]:
    """Returns the directories of those of `names` that this machine has, as a directory or in the hub's cache. That of
    the model `weights` counts only with all of its weights in the safetensors format."""
    found = {name: model_directory(name, TOKENIZER) for name in names}
    return {
        name: directory.absolute()
        for name, directory in found.items()
        if directory and not (name == weights and lacks_weights(directory))
    }


def _digest(file: Path) -> str:
    size = file.stat().st_size
    digest = xxhash.xxh3_64(str(size).encode())
    with file.open("rb") as opened:
        for begin, count in _pieces(size):
            opened.seek(begin)
            digest.update(opened.read(count))
    return digest.hexdigest()


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """Yields (begin, count) of what is read of a file: pieces at equal distances, the first and the last among them."""
    if size <= WHOLE_BYTES:
        yield 0, size
        return
    for number in range(PIECES):
        yield number * (size - PIECE_BYTES) // (PIECES - 1), PIECE_BYTES
