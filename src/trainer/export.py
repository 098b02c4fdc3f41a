"""Published weights as a directory: a model opens with `from_pretrained` and with vLLM, adapters with peft and
`vllm serve --lora-modules`.

The tensors are written from the buckets that the replicas get, so they are not gathered again. Each rank of the trainer
writes the buckets that it stores for receivers, so that no bytes travel and all ranks write at the same time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer, PreTrainedModel

from trireme.checkpoint.files import FileRecord, storage_errors, write_bytes
from trireme.core.base_digest import INDEX
from trireme.core.finite_json import to_json
from trireme.core.weights import AdapterSpec, TensorEntry

FILE_BYTES = 4 * 2**30
"""Size at which the next file of tensors begins."""

ADAPTER_WEIGHTS = "adapter_model.safetensors"
Buckets = Mapping[int, npt.NDArray[np.uint8]] | Sequence[npt.NDArray[np.uint8]]
"""Buckets by their numbers: those that are needed, or all."""


def companion_files(
    tokenizer: str, model: PreTrainedModel | None = None, dtype: torch.dtype | None = None
) -> dict[str, bytes]:
    """Returns {name: contents} of the files that accompany saved tensors: the files of `tokenizer` (a local directory
    or a name on the hub) and, with `model`, its configuration and generation configuration. The configuration names
    `dtype` as the dtype of the weights. Raises StorageFailed if these files cannot be written to a temporary
    directory."""
    parts: list[Any] = [AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)]
    if model is not None:
        parts.append(deepcopy(model.config))
        parts[1].dtype = dtype
        if model.generation_config is not None:  # None: a model class that cannot generate
            parts.append(model.generation_config)
    with storage_errors(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory() as directory:
        for part in parts:
            part.save_pretrained(directory)
        files = sorted(file for file in Path(directory).rglob("*") if file.is_file())
        return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def write_weights(
    path: Path,
    entries: Sequence[TensorEntry],
    buckets: Buckets,
    companions: Mapping[str, bytes],
    adapter: bool = False,
    file_bytes: int = FILE_BYTES,
    rank: int = 0,
    size: int = 1,
) -> list[FileRecord]:
    """Writes this rank's part of published weights into directory `path`: the tensors in its share of the buckets
    (`trireme.core.weights.Layout`), one of `size` shares. Rank 0 also writes the files `companions`, {name: contents}.
    Returns the records of the written files. Raises StorageFailed.

    A model is cut into files of about `file_bytes` bytes, each with tensors of one share; rank 0 writes their index. An
    `adapter` is one file, which one rank writes alone. `entries` say where in `buckets` the tensors are.

    A safetensors file begins with the length of its header, as 8 bytes, little-endian. The header follows: a JSON
    object, padded with spaces to a multiple of 8 bytes. Source: https://github.com/safetensors/safetensors#format
    """
    records: list[FileRecord] = []
    if rank == 0:
        records += [write_bytes(path, name, contents) for name, contents in companions.items()]
    if adapter:
        parts = [list(entries)]
    else:
        shares = ([entry for entry in entries if entry.bucket % size == owner] for owner in range(size))
        parts = [part for share in shares for part in _parts(share, file_bytes)]
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        if adapter:
            name = ADAPTER_WEIGHTS
        else:
            name = f"model-{number:05d}.safetensors"
        weight_map.update({entry.name: name for entry in part})
        if not adapter and part[0].bucket % size != rank:
            continue
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for e, end in zip(part, accumulate(e.nbytes for e in part), strict=True):
            header[e.name] = {"dtype": e.dtype, "shape": e.shape, "data_offsets": [end - e.nbytes, end]}
        text = to_json(header).encode()
        text += b" " * (-len(text) % 8)
        tensors = (buckets[e.bucket][e.offset : e.offset + e.nbytes].data for e in part)
        records.append(write_bytes(path, name, len(text).to_bytes(8, "little"), text, *tensors))
    if rank == 0 and not adapter:
        index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": weight_map}
        records.append(write_bytes(path, INDEX, to_json(index, indent=1).encode()))
    return records


def own_part(
    entries: Sequence[TensorEntry], buckets: Buckets, spec: AdapterSpec
) -> tuple[list[TensorEntry], list[npt.NDArray[np.uint8]]]:
    """Returns an adapter's tensors at the adapter's own rank and layers: A [rank, inputs] and B [outputs, rank] of the
    layers `spec.targets`. `entries` and `buckets` have these tensors padded with zeros to the rank and layers of
    `trainer.lora`. The result is new entries and buckets, with each tensor in a separate bucket."""
    local_entries: list[TensorEntry] = []
    parts: list[npt.NDArray[np.uint8]] = []
    for entry in entries:
        layer, _, which = entry.name.partition(".lora_")
        if layer.rpartition(".")[2] in spec.targets:
            whole = buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes].reshape(*entry.shape, -1)
            part = np.ascontiguousarray(whole[: spec.rank] if which.startswith("A") else whole[:, : spec.rank])
            local_entries.append(
                replace(entry, shape=part.shape[:2], bucket=len(parts), offset=0, nbytes=part.nbytes, hash="")
            )
            parts.append(part.reshape(-1))
    return local_entries, parts


def _parts(entries: Sequence[TensorEntry], file_bytes: int) -> Iterator[list[TensorEntry]]:
    """Yields the entries, in order, in groups of at most `file_bytes` bytes; a larger tensor is a group of its own."""
    part: list[TensorEntry] = []
    size = 0
    for entry in entries:
        if part and size + entry.nbytes > file_bytes:
            yield part
            part = []
            size = 0
        part.append(entry)
        size += entry.nbytes
    if part:
        yield part
