"""Computes the digest that names the weights a LoRA adapter was trained on, from a model's safetensors files.

Adapters mean nothing without their base, and only adapters travel. So trainer and replicas each compute the digest of
the base from the files that they load; it is part of the digest of everything that is published, and of every
checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from trireme.core.model_files import model_file
from trireme.core.refusals import Refusal
from trireme.core.weights import TensorEntry, table_digest

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def base_digest(name: str) -> str:
    """Returns the digest (32 hex digits) of the names, dtypes, shapes and contents of a model's stored tensors. It does
    not depend on how the tensors are split into files. `name`: a local directory, or a model on the hub, from which
    missing files are fetched.

    Raises BadInput for a model without safetensors files.
    """
    entries: list[TensorEntry] = []
    for file in weight_files(name):
        begin, header = read_header(file)
        data = np.memmap(file, dtype=np.uint8, mode="r")
        for tensor, about in header.items():
            start, end = about["data_offsets"]
            digest = xxhash.xxh3_128_hexdigest(data[begin + start : begin + end].data)
            shape = tuple(about["shape"])
            entries.append(TensorEntry(tensor, about["dtype"], shape, 0, begin + start, end - start, digest))
    return table_digest(entries)


def stored_shapes(name: str) -> dict[str, tuple[int, ...]] | None:
    """Returns {tensor: shape} of the model `name` (a directory or a name on the hub), from the headers of its
    safetensors files; None if it has no such files.

    Raises BadInput for a model that lacks some of its files, or has one with a wrong header.
    """
    about = _stored(name)
    if about is None:
        return None
    return {tensor: tuple(entry["shape"]) for tensor, entry in about.items()}


def stored_dtypes(name: str) -> set[str]:
    """Returns the dtypes, such as BF16, of the tensors of the model `name` (a directory or a name on the hub), from the
    headers of its safetensors files; an empty set if the model has no such files. Raises BadInput for a model that
    lacks some of its files."""
    return {entry["dtype"] for entry in (_stored(name) or {}).values()}


def _stored(name: str) -> dict[str, Any] | None:
    """Returns {tensor: its entry in a safetensors header} of the model `name`; None if it has no safetensors files."""
    if model_file(name, INDEX) is None and model_file(name, SINGLE) is None:
        return None
    headers = (read_header(file)[1] for file in weight_files(name))
    return {tensor: about for header in headers for tensor, about in header.items()}


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Returns the byte offset at which the tensors begin in a safetensors file, and {tensor: its entry in the header}.
    If the header is wrong, raises BadInput that names the file (the library's own error does not name it)."""
    try:
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        raise Refusal(
            f"{file}, whose header does not describe it: {error}",
            "a safetensors file with a header of at most 100 MB, whose tensors fill the rest of the file without gaps",
            "fetch or write the file again; do not use it if a stranger made it",
        ) from None
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header: dict[str, object] = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    return 8 + size, header


def weight_files(name: str) -> list[Path]:
    """Returns the safetensors files of the model `name` (a directory or a name on the hub). Raises BadInput if there
    are none, or if some are missing."""
    index = model_file(name, INDEX)
    if index:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    else:
        names = [SINGLE]
    paths = {file: model_file(name, file) for file in names}
    missing = [file for file, path in paths.items() if path is None]
    if missing and index is None:
        raise Refusal(
            f"model.name = {name}, which has neither {SINGLE} nor {INDEX}",
            "a model whose weights are in the safetensors format: adapters name their base by its digest",
            "save it again with save_pretrained, or train all its weights (leave --trainer.lora.rank out)",
        )
    if missing:
        raise Refusal(
            f"model.name = {name}, which lacks {', '.join(missing)}",
            f"all files that its {INDEX} names",
            "fetch the model again",
        )
    return [path for path in paths.values() if path is not None]
