"""Exports the model of a commit as a directory in the Hugging Face layout, in another dtype if wanted. A LoRA adapter
is exported in peft's layout, or merged into its base."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trireme.checkpoint.files import storage_errors
from trireme.checkpoint.resume import choose_existing
from trireme.checkpoint.store import CheckpointStore, VerifiedCommit
from trireme.core.base_digest import read_header
from trireme.core.errors import CheckpointInvalid
from trireme.core.finite_json import to_json
from trireme.core.paths import path_in
from trireme.core.refusals import Refusal
from trireme.tools.merge import ADAPTER, merged_files

DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""As safetensors writes them, and as torch does."""
DTYPES = tuple(DTYPE_NAMES.values())
PART = "inference/"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ExportedModel:
    """The result of `export`: where the model was written, and what it consists of."""

    commit: Path
    out: Path  # its directory
    files: int
    dtype: str  # of its weights


def export(
    root: Path, step: int | None, dtype: str | None, out: Path | None, on_file: Callable[[str], None], *, merge: bool
) -> ExportedModel:
    """Writes the model of the commit of `step` (None: the newest that verifies) to the directory `out` (None: one in
    the run's exports/). `out` appears only when it is complete.

    Casts floating-point tensors to `dtype` (None: no cast), one file after the other, and calls `on_file` with the name
    of each file. `merge`: merges the commit's adapter into its base, and writes the whole model.

    Raises BadInput if the commit is missing or damaged, if it has no adapter to merge, if the base has changed, if the
    model lacks tensors of its class, or if `out` is in use. Raises StorageFailed.
    """
    chosen = chosen_commit(root, step)
    commit = chosen.path
    paths = [record.path for record in chosen.manifest.files]
    try:
        read = {
            path.removeprefix(PART): partial(_read, commit, path, on_file) for path in paths if path.startswith(PART)
        }
        if merge and ADAPTER not in read:
            raise Refusal(
                f"--merge for {commit}, which holds a whole model",
                "a commit of a run that trained LoRA adapters",
                "leave --merge out",
            ).error()
        if merge:
            kind = "merged"
        elif ADAPTER in read:
            kind = "adapter"
        else:
            kind = None
        if dtype or kind:
            label = dtype
        else:
            label = json.loads(read[CONFIG]())["dtype"]
        name = "-".join(part for part in (commit.name, label, kind) if part)
        out = (out or root / "exports" / name).expanduser().absolute()
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise Refusal(
                f"--out {out}, which exists and is not an empty directory",
                "a new or an empty directory: nothing is overwritten",
                "choose another --out, or remove it",
            ).error()
        if merge:
            files = merged_files(read, on_file, exact=dtype is not None)
        else:
            files = ((name, get()) for name, get in read.items())
        return ExportedModel(commit, out, *_write_beside(out, files, dtype))
    except CheckpointInvalid as error:
        raise Refusal(
            f"the commit {commit}, which is damaged: {error}",
            "a commit whose inference/ is as it was written",
            "choose another --step; without one the newest that verifies is taken",
        ).error() from None


def chosen_commit(root: Path, step: int | None) -> VerifiedCommit:
    """Returns the commit of `step` (None: the newest that verifies) of the run in `root`. Raises BadInput if there is
    no such commit, or if it does not verify."""
    return choose_existing(CheckpointStore(root), step, "--step", "no --step")


def _write_beside(out: Path, files: Iterable[tuple[str, bytes]], dtype: str | None) -> tuple[int, str]:
    """Writes all `files`, (path below `out`, contents), to a directory next to `out`, then renames this directory to
    `out`. Casts tensors to `dtype` (None: no cast).

    Returns the number of files, and the dtype of their tensors.
    """
    draft = out.with_name(f"{out.name}.partial-{secrets.token_hex(4)}")
    try:
        written = 0
        tensor_bytes = 0
        shown = ""
        for name, contents in files:
            data = contents
            if name.endswith(".safetensors"):
                if dtype:
                    data, size = cast_tensors(data, dtype)
                    tensor_bytes += size
                header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
                first = next(about["dtype"] for tensor, about in header.items() if tensor != "__metadata__")
                shown = shown or DTYPE_NAMES.get(first, first)
            _write(path_in(draft, name), data)
            written += 1
        if dtype:
            _edit(draft / CONFIG, {"dtype": dtype})
            _edit(draft / INDEX, {"metadata": {"total_size": tensor_bytes}})
        with storage_errors(out):
            draft.replace(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return written, shown


def _read(commit: Path, path: str, on_file: Callable[[str], None]) -> bytes:
    """Returns the contents of the file `path` of a commit. Raises CheckpointInvalid if the file is gone (a run deletes
    old commits) or damaged."""
    on_file(path)
    file = path_in(commit, path)
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
    """Sets `changes` in a JSON file. Does nothing if the file does not exist: an adapter has no model configuration, a
    small model no index."""
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
                ).error()
    return save(tensors, metadata={"format": "pt"}), sum(tensor.nbytes for tensor in tensors.values())
