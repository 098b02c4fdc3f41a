"""Finds the files of a model on this machine, and tells within a second whether two copies of a model differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import xxhash

from trireme.core.tokenizer import looks_like_path

WHOLE_BYTES = 2**22
"""Files up to this size are compared by all of their bytes, larger files by their size and pieces of them."""
PIECES = 16
PIECE_BYTES = 2**16
CONFIG = "config.json"
COMPARED = frozenset({".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken"})
"""The ends of names of files that hold weights, a configuration or a tokenizer."""


def model_directory(name: str) -> Path | None:
    """Returns the directory in which this node has the model `name` (a directory or a name on the hub); None if this
    node does not have the model. Downloads nothing."""
    if looks_like_path(name):
        directory = Path(name).expanduser()
        if (directory / CONFIG).is_file():
            return directory
        return None
    import huggingface_hub as hub

    file = hub.try_to_load_from_cache(name, CONFIG)
    if isinstance(file, str):
        return Path(file).parent
    return None


def model_file(name: str, file: str) -> Path | None:
    """Returns the path of `file` of the model `name` (a directory or a name on the hub). Fetches it from the hub if
    this node lacks it. Returns None if the model has no such file."""
    if looks_like_path(name):
        path = Path(name).expanduser() / file
        if path.is_file():
            return path
        return None
    import huggingface_hub as hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    cached = hub.try_to_load_from_cache(name, file)
    if isinstance(cached, str):
        return Path(cached)
    try:
        return Path(hub.hf_hub_download(name, file))
    except (EntryNotFoundError, LocalEntryNotFoundError):
        return None


def file_digests(directory: Path) -> dict[str, str]:
    """Returns {file name: digest} of each file in `directory` that holds a part of the model. A digest covers the
    file's size and contents; of a large file it covers only some pieces of the contents. Raises OSError."""
    files = sorted(file for file in directory.iterdir() if file.suffix in COMPARED and file.is_file())
    return {file.name: _digest(file) for file in files if not file.name.startswith(".")}


def _digest(file: Path) -> str:
    size = file.stat().st_size
    digest = xxhash.xxh3_64(str(size).encode())
    with file.open("rb") as opened:
        for begin, count in _pieces(size):
            opened.seek(begin)
            digest.update(opened.read(count))
    return digest.hexdigest()


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """Yields (begin, count), in bytes, of the pieces that a digest covers in a file of `size` bytes: all of a small
    file, else PIECES pieces at equal distances, the first and the last included."""
    if size <= WHOLE_BYTES:
        yield 0, size
        return
    for number in range(PIECES):
        yield number * (size - PIECE_BYTES) // (PIECES - 1), PIECE_BYTES
