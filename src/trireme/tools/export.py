"""Exports the model of a checkpoint as a directory in the Hugging Face layout, in another dtype if wanted. A LoRA
adapter is exported in peft's layout, or merged into its base."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path

from trireme.checkpoint.files import storage_errors
from trireme.checkpoint.resume import choose_existing
from trireme.checkpoint.store import CheckpointStore, VerifiedCheckpoint
from trireme.core.base_digest import read_header
from trireme.core.errors import CheckpointInvalid
from trireme.core.finite_json import to_json
from trireme.core.paths import path_in
from trireme.core.refusals import Refusal
from trireme.tools.merge import ADAPTER, merged_files

DTYPES = ("bfloat16", "float16", "float32")
PART = "inference/"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
CARD = "README.md"


def export(
    root: Path,
    step: int | None,
    dtype: str | None,
    out: Path | None,
    on_file: Callable[[str], None],
    *,
    merge: bool,
    card: Callable[[VerifiedCheckpoint, str], str] | None = None,
) -> tuple[Path, Path]:
    """Writes the model of the checkpoint of `step` (None: the newest that verifies) to the directory `out` (None: a
    directory in the run's exports/). `out` appears only when it is complete. Returns (the checkpoint, `out`).

    Casts floating-point tensors to `dtype` (None: no cast), one file after the other, and calls `on_file` with the name
    of each file. `merge`: merges the checkpoint's adapter into its base, and writes the whole model. `card`: returns
    the text of a model card for the checkpoint and the kind of model, `adapter` or `whole model`. If `out` already
    holds a card with the same text, `out` is complete and nothing is written.

    Raises BadInput if the checkpoint is missing or damaged, if it has no adapter to merge, if the base has changed, or
    if `out` exists, is not an empty directory and does not hold the same card. Raises StorageFailed.
    """
    chosen = chosen_checkpoint(root, step)
    checkpoint = chosen.path
    paths = [record.path for record in chosen.manifest.files]
    try:
        read: dict[str, Callable[[], bytes]] = {
            path.removeprefix(PART): partial(_read, checkpoint, path, on_file)
            for path in paths
            if path.startswith(PART)
        }
        kind = _kind(read, merge, checkpoint)
        if dtype or kind:
            label = dtype
        else:
            label = json.loads(read[CONFIG]())["dtype"]
        name = "-".join(part for part in (checkpoint.name, label, kind) if part)
        out = (out or root / "exports" / name).expanduser().absolute()
        if card:
            text = card(chosen, "adapter" if kind == "adapter" else "whole model").encode()
            if (out / CARD).is_file() and (out / CARD).read_bytes() == text:
                return checkpoint, out
            read[CARD] = lambda: text
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise Refusal(
                f"--out {out}, which exists and is not an empty directory",
                "a new or an empty directory: nothing is overwritten",
                "choose another --out, or remove it",
            )
        if merge:
            files = merged_files(read, on_file, exact=dtype is not None)
        else:
            files = ((name, get()) for name, get in read.items())
        _write_beside(out, files, dtype)
        return checkpoint, out
    except CheckpointInvalid as error:
        raise Refusal(
            f"the checkpoint {checkpoint}, which is damaged: {error}",
            "a checkpoint whose inference/ is as it was written",
            "choose another --step; without one the newest that verifies is taken",
        ) from None


def _kind(names: Collection[str], merge: bool, checkpoint: Path) -> str | None:
    """Returns the kind of an export of `checkpoint`: `merged` or `adapter`; None for a model that was trained whole.
    `names`: the names of the model's files. Raises BadInput if there is no adapter to merge."""
    if merge and ADAPTER not in names:
        raise Refusal(
            f"--merge for {checkpoint}, which holds a whole model",
            "a checkpoint of a run that trained LoRA adapters",
            "leave --merge out",
        )
    if merge:
        return "merged"
    if ADAPTER in names:
        return "adapter"
    return None


def chosen_checkpoint(root: Path, step: int | None) -> VerifiedCheckpoint:
    """Returns the checkpoint of `step` (None: the newest that verifies) of the run in `root`. Raises BadInput if there
    is no such checkpoint, or if it does not verify."""
    return choose_existing(CheckpointStore(root), step, "--step", "no --step")


def _write_beside(out: Path, files: Iterable[tuple[str, bytes]], dtype: str | None) -> None:
    """Writes all `files`, (path below `out`, contents), to a new directory next to `out`, then renames this directory
    to `out`. Casts floating-point tensors to `dtype` (None: no cast)."""
    draft = out.with_name(f"{out.name}.partial-{secrets.token_hex(4)}")
    try:
        tensor_bytes = 0
        for name, contents in files:
            data = contents
            if dtype and name.endswith(".safetensors"):
                data, size = cast_tensors(data, dtype)
                tensor_bytes += size
            _write(path_in(draft, name), data)
        if dtype:
            _edit(draft / CONFIG, {"dtype": dtype})
            _edit(draft / INDEX, {"metadata": {"total_size": tensor_bytes}})
        with storage_errors(out):
            draft.replace(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _read(checkpoint: Path, path: str, on_file: Callable[[str], None]) -> bytes:
    """Returns the contents of the file `path` of a checkpoint. Raises CheckpointInvalid if the file is gone (a run
    deletes old checkpoints) or damaged."""
    on_file(path)
    file = path_in(checkpoint, path)
    try:
        if path.endswith(".safetensors"):
            read_header(file)
        return file.read_bytes()
    except OSError as error:
        raise CheckpointInvalid(f"{path} cannot be read ({error.strerror})") from None


def _write(file: Path, data: bytes) -> None:
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def _edit(file: Path, changes: Mapping[str, object]) -> None:
    """Sets the keys in `changes` to their values in a JSON file. Does nothing if the file does not exist: an adapter
    has no model configuration, and a small model has no index."""
    if not file.exists():
        return
    values = json.loads(file.read_bytes())
    _write(file, (to_json(values | changes, indent=2) + "\n").encode())


def cast_tensors(data: bytes, dtype: str) -> tuple[bytes, int]:
    """Casts the floating-point tensors of the safetensors file `data` to `dtype`. Returns the contents of the new file,
    and the number of bytes of all its tensors.

    Raises BadInput for a number that `dtype` cannot hold (float16 ends at 65504).
    """
    import torch
    from safetensors.torch import load, save

    target = getattr(torch, dtype)
    tensors = load(data)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.to(target)
            if not tensors[name].isfinite().all() and tensor.isfinite().all():
                raise Refusal(
                    f"tensor {name}, with numbers up to {tensor.abs().max():.3g}, in {target}",
                    "a dtype that can hold them",
                    "choose --dtype bfloat16 or float32",
                )
    return save(tensors, metadata={"format": "pt"}), sum(tensor.nbytes for tensor in tensors.values())
