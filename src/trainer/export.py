"""Published weights as a directory: a model opens with `from_pretrained` and with vLLM, adapters with peft and
`vllm serve --lora-modules`.

The tensors are written from the buckets that the replicas get, so they are not gathered again.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer, PreTrainedModel

from trireme.checkpoint.files import FileRecord, storage_errors, write_bytes
from trireme.core.base_digest import INDEX
from trireme.core.weights import TensorEntry

FILE_BYTES = 4 * 2**30
"""Size at which the next file of tensors begins."""

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def companion_files(
    tokenizer: str, model: PreTrainedModel | None = None, dtype: torch.dtype | None = None
) -> dict[str, bytes]:
    """Returns the files beside the tensors, by name: the tokenizer's (a local directory or a name on the hub), and a
    model's configuration with `dtype` and generation configuration.

    Raises StorageFailed, because they pass through a temporary directory.
    """
    parts: list[Any] = [AutoTokenizer.from_pretrained(tokenizer)]
    if model is not None:
        parts += [deepcopy(model.config), model.generation_config]
        parts[1].dtype = dtype
    with storage_errors(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory() as directory:
        for part in parts:
            part.save_pretrained(directory)
        files = sorted(file for file in Path(directory).rglob("*") if file.is_file())
        return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def write_weights(
    path: Path,
    entries: Sequence[TensorEntry],
    buckets: Sequence[npt.NDArray[np.uint8]],
    companions: Mapping[str, bytes],
    adapter: bool = False,
    file_bytes: int = FILE_BYTES,
) -> list[FileRecord]:
    """Writes the tensors and `companions`: a model in files of about `file_bytes` with their index, an `adapter` in one
    file. Raises StorageFailed."""
    records = [write_bytes(path, name, contents) for name, contents in companions.items()]
    parts = [list(entries)] if adapter else list(_parts(entries, file_bytes))
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = ADAPTER_WEIGHTS if adapter else f"model-{number:05d}.safetensors"
        tensors = (buckets[e.bucket][e.offset : e.offset + e.nbytes].data for e in part)
        records.append(write_bytes(path, name, _safetensors_header(part), *tensors))
        weight_map.update({entry.name: name for entry in part})
    if not adapter:
        index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": weight_map}
        records.append(write_bytes(path, INDEX, json.dumps(index, indent=1).encode()))
    return records


def _parts(entries: Sequence[TensorEntry], file_bytes: int) -> Iterator[list[TensorEntry]]:
    """Cuts the entries, in order, into parts of at most `file_bytes`; a larger tensor is a part of its own."""
    part: list[TensorEntry] = []
    size = 0
    for entry in entries:
        if part and size + entry.nbytes > file_bytes:
            yield part
            part, size = [], 0
        part.append(entry)
        size += entry.nbytes
    if part:
        yield part


def _safetensors_header(entries: Sequence[TensorEntry]) -> bytes:
    """Returns the header of a safetensors file that holds `entries`, one after the other: 8 bytes with the length of a
    JSON object, little-endian, and the object, padded with spaces to a multiple of 8 bytes.

    Source: https://github.com/safetensors/safetensors#format
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
