"""Takes the model of a commit out of a run: a directory in the Hugging Face layout, in another dtype if wanted."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from trireme.checkpoint.files import FileRecord, storage_errors
from trireme.checkpoint.manifest import read_manifest, step_of
from trireme.checkpoint.store import CheckpointStore
from trireme.config.problems import Problem
from trireme.errors import CheckpointInvalid

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32")
PART = "inference/"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Exported:
    commit: Path
    out: Path
    files: int
    dtype: str


def export(
    root: Path, step: int | None, dtype: str | None, out: Path | None, on_file: Callable[[str], None]
) -> Exported:
    """Writes the model of the commit of `step` (None: the newest that verifies) to `out` (None: in the run's exports/).

    Every file is compared with the checksum that it was committed with. Tensors of floating point are cast to `dtype`
    (None: as they are), one file after the other; `on_file` is told which. `out` appears when it is complete. Raises
    BadInput for a commit that is not there or damaged, and an `out` that is in use; StorageFailed.
    """
    commit = chosen_commit(CheckpointStore(root), step)
    try:
        records = {r.path.removeprefix(PART): r for r in read_manifest(commit).files if r.path.startswith(PART)}
        shown = dtype or json.loads(_read(commit, records[CONFIG]))["dtype"]
        out = (out or root / "exports" / f"{commit.name}-{shown}").expanduser().absolute()
        _refuse_used(out)
        _write_beside(out, commit, records, dtype, on_file)
    except CheckpointInvalid as error:
        raise _damaged(commit, str(error)).error() from None
    return Exported(commit, out, len(records), shown)


def chosen_commit(store: CheckpointStore, step: int | None) -> Path:
    """The commit of `step` (None: the newest that verifies). Raises BadInput when there is none."""
    steps = ", ".join(str(step_of(commit.name)) for commit in store.commits()) or "none"
    if step is not None:
        if not store.commit(step).exists():
            raise Problem(
                f"--step {step}, of which {store.checkpoints} holds no commit",
                f"the step of a commit; there are: {steps}",
                f"choose one of these, or look at them with: trireme inspect {store.root}",
            ).error()
        return store.commit(step)
    found = store.newest()
    if found.commit is None:
        reasons = "; ".join(map(str, found.passed_over)) or f"{store.checkpoints} holds none"
        raise Problem(
            f"a run without a commit that verifies ({reasons})",
            f"a commit to export; there are: {steps}",
            "let the run go on to its first commit, or choose another run",
        ).error()
    return found.commit


def _damaged(commit: Path, reason: str) -> Problem:
    return Problem(
        f"the commit {commit}, which is damaged: {reason}",
        "a commit whose inference/ is as it was written",
        "choose another --step; without one the newest that verifies is taken",
    )


def _refuse_used(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Problem(
            f"--out {out}, which exists and is not an empty directory",
            "a new or an empty directory: nothing is overwritten",
            "choose another --out, or remove it",
        ).error()


def _write_beside(
    out: Path, commit: Path, records: Mapping[str, FileRecord], dtype: str | None, on_file: Callable[[str], None]
) -> None:
    """Writes all files ({name in `out`: record}) to a directory beside `out`, which then gets its name."""
    draft = out.with_name(f"{out.name}.partial-{secrets.token_hex(4)}")
    try:
        tensor_bytes = 0
        for name, record in records.items():
            on_file(record.path)
            data = _read(commit, record)
            if dtype and name.endswith(".safetensors"):
                data, size = cast_tensors(data, dtype)
                tensor_bytes += size
            _write(draft / name, data)
        if dtype:
            _edit(draft / CONFIG, {"dtype": dtype})
            _edit(draft / INDEX, {"metadata": {"total_size": tensor_bytes}})
        with storage_errors(out):
            draft.replace(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _read(commit: Path, record: FileRecord) -> bytes:
    """The contents of a file of a commit. Raises CheckpointInvalid unless they are those that were written."""
    try:
        data = (commit / record.path).read_bytes()
    except OSError as error:
        raise CheckpointInvalid(f"{record.path} cannot be read ({error.strerror})") from None
    if xxhash.xxh3_128_hexdigest(data) != record.checksum:
        raise CheckpointInvalid(f"the contents of {record.path} were altered")
    return data


def _write(file: Path, data: bytes) -> None:
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def _edit(file: Path, changes: Mapping[str, Any]) -> None:
    values = json.loads(file.read_bytes())
    _write(file, (json.dumps(values | changes, indent=2) + "\n").encode())


def cast_tensors(data: bytes, dtype: str) -> tuple[bytes, int]:
    """The safetensors file `data` with its tensors of floating point in `dtype`, and the bytes of its tensors.

    Raises BadInput for a number that `dtype` cannot hold (float16 ends at 65504).
    """
    import torch
    from safetensors.torch import load, save

    wanted = getattr(torch, dtype)
    tensors = load(data)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.to(wanted)
            _refuse_overflow(name, tensor, tensors[name])
    return save(tensors, metadata={"format": "pt"}), sum(tensor.nbytes for tensor in tensors.values())


def _refuse_overflow(name: str, before: torch.Tensor, after: torch.Tensor) -> None:
    if not after.isfinite().all() and before.isfinite().all():
        raise Problem(
            f"tensor {name}, with numbers up to {before.abs().max():.3g}, in {after.dtype}",
            "a dtype that can hold them",
            "choose --dtype bfloat16 or float32",
        ).error()
