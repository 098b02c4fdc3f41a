"""The trainer's part of a commit: weights, AdamW's state and random generators, by torch.distributed.checkpoint (DCP).

A save copies what this rank holds to buffers in host memory, and writes them, in a thread: training goes on meanwhile.
Nothing of the state changes between one optimiser step and the next, so only `optim_step` has to wait, and only for the
copy (`Checkpointer.wait_until_copied`). The buffers are made at the first save and used again. DCP's collectives have a
process group of their own, so that they never mix with training's.

What goes wrong while one rank copies or writes is raised on all of them, and leaves them ready for the next save: DCP
brings such errors to every rank as long as they come up inside the hooks that it calls. So the copy is made in one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trireme.checkpoint.files import FileRecord, HashingWriter, fsync_directory, make_directory, storage_errors
from trireme.errors import CheckpointInvalid, StorageFailed
from trireme.faults import fault_point


def make_adam_state(optimizer: torch.optim.AdamW) -> None:
    """Makes the state that AdamW otherwise makes at its first step, so that there is one to save, or to load into.

    (DCP's own way is a step with gradients of zero, after which AdamW counts one step too many.)
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}


def named_state(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """All parameters and their AdamW state under names of their own: the tensors themselves, not copies."""
    state = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        state.update({f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()})
    return state


def random_state() -> dict[str, Tensor]:
    """The state of this process' random generators: torch's uint8, numpy's and Python's as numbers, float64.

    (Their words have 32 bits, which float64 holds exactly; NaN stands for Python's None.)
    """
    _, words, position, has_gauss, gauss = np.random.get_state()
    _, python_words, python_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*words, position, has_gauss, gauss], dtype=torch.float64),
        "python": torch.tensor([*python_words, np.nan if python_gauss is None else python_gauss], dtype=torch.float64),
    }
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Sets the generators that `state` (of `random_state`) names; the others stay as they are."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        *words, position, has_gauss, gauss = state["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), int(position), int(has_gauss), gauss))
    if "python" in state:
        *words, gauss = state["python"].tolist()
        random.setstate((3, tuple(int(word) for word in words), None if np.isnan(gauss) else gauss))


class RecordingFileSystem(FileSystem):
    """DCP's file system for writing: files are hashed on their way, forced onto the disk, and recorded.

    Raises StorageFailed instead of OSError.
    """

    def __init__(self) -> None:
        self._written: dict[Path, HashingWriter] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb", f"only for writing, got mode {mode}"
        with storage_errors(path):
            with HashingWriter(path) as stream:
                yield stream
            fsync_directory(path.parent)
        self._written[path] = stream

    def mkdir(self, path: Any) -> None:
        with storage_errors(path):
            make_directory(path)

    def rename(self, path: Any, new_path: Any) -> None:
        with storage_errors(new_path):
            super().rename(path, new_path)
            fsync_directory(new_path.parent)
        self._written[new_path] = self._written.pop(path)

    def records(self) -> list[FileRecord]:
        """Of all files written, relative to the directory above theirs."""
        return [stream.record(f"{path.parent.name}/{path.name}") for path, stream in sorted(self._written.items())]


class Writer(dcp.FileSystemWriter):
    """Writes one file per rank, and rank 0 the table of all. `copy` is called before the data is written."""

    fs: RecordingFileSystem

    def __init__(self, path: Path, copy: Any) -> None:
        # Not `sync_files`: DCP would force every file of the machine onto its disks; the streams do it for their own.
        super().__init__(path, sync_files=False, per_thread_copy_ahead=0, overwrite=False)
        self.fs = RecordingFileSystem()
        self._copy = copy

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future[list[Any]]:
        self._copy()
        fault_point("trainer.save")
        return super().write_data(plan, planner)


def _buffer_of(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Room in host memory for what this rank holds of `tensor`, sharded like it over the CPU `mesh`."""
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device="cpu")
    local = torch.empty_like(tensor.to_local(), device="cpu", pin_memory=tensor.device.type == "cuda")
    return DTensor.from_local(local, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Checkpointer:
    """Saves and loads one rank's part of the trainer's state. Constructing it, `begin` and `load` are collective.

    `parameters` are the sharded ones by name, `optimizer` has its state already. `timeout_s` is for DCP's collectives.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW, timeout_s: float) -> None:
        # Files have checksums of their own. Those within, of each tensor, would take longer than all of the copying.
        torch.serialization.set_crc32_options(False)
        self._live = named_state(parameters, optimizer)
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._buffers: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._saves: dict[Path, Future[list[FileRecord]]] = {}
        self._copied = Event()
        self._copied.set()

    def begin(self, path: Path) -> None:
        """Begins to save into directory `path` the state as it is now; after another save that is not yet done."""
        if not self._buffers:
            mesh = DeviceMesh.from_group(self._group, "cpu")
            self._buffers = {name: _buffer_of(tensor, mesh) for name, tensor in self._live.items()}
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        own = {self._random_name(kind): tensor for kind, tensor in random_state().items()}
        self._copied = Event()
        self._saves[path] = self._thread.submit(self._save, path, own, self._copied)

    def finish(self, path: Path) -> list[FileRecord]:
        """Waits until this rank's files in `path` are on the disk. Raises StorageFailed, also for another rank."""
        return self._saves.pop(path).result()

    def wait_until_copied(self) -> None:
        """Waits until the state may change: a save that has begun no longer needs it."""
        self._copied.wait()

    def load(self, path: Path) -> None:
        """Reads what was saved in `path`, by any number of ranks; those that had no counterpart then keep their random
        generators as they are. Raises CheckpointInvalid when it is the state of another model, or cannot be read."""
        self.wait_until_copied()
        reader = dcp.FileSystemReader(path)
        saved = set(reader.read_metadata().state_dict_metadata)
        _refuse_other_tensors(path, {name for name in saved if not name.startswith("random.")}, set(self._live))
        generators = {kind: tensor for kind, tensor in random_state().items() if self._random_name(kind) in saved}
        state = {**self._live, **{self._random_name(kind): tensor for kind, tensor in generators.items()}}
        try:
            dcp.load(
                state,
                storage_reader=reader,
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
                process_group=self._group,
            )
        except dcp.CheckpointException as error:
            raise CheckpointInvalid(f"cannot load the trainer's state from {path}: {_cause(error)}") from None
        set_random_state(generators)

    def _random_name(self, kind: str) -> str:
        return f"random.{dist.get_rank()}.{kind}"

    def _save(self, path: Path, own: Mapping[str, Tensor], copied: Event) -> list[FileRecord]:
        def copy() -> None:
            self._copy()
            copied.set()

        writer = Writer(path, copy)
        try:
            dcp.save(
                {**self._buffers, **own},
                storage_writer=writer,
                planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
                process_group=self._group,
            )
        except dcp.CheckpointException as error:
            raise _cause(error) from None
        finally:
            copied.set()
        return writer.fs.records()

    @torch.no_grad()
    def _copy(self) -> None:
        buffers, live = ([_local(t) for t in tensors.values()] for tensors in (self._buffers, self._live))
        with torch.cuda.stream(self._stream):  # of none: nothing
            torch._foreach_copy_(buffers, live, non_blocking=True)
        if self._stream:
            self._stream.synchronize()


def _cause(error: dcp.CheckpointException) -> Exception:
    """What went wrong on the rank that it went wrong on; a failure of storage before others. (DCP's own exception is
    none that `except Exception` catches.)"""
    causes = [(rank, cause) for rank, (cause, _) in error.failures.items()]
    for _, cause in causes:
        if isinstance(cause, StorageFailed):
            return cause
    rank, cause = causes[0]
    return RuntimeError(f"shard {rank}: {type(cause).__name__}: {cause}")


def _refuse_other_tensors(path: Path, saved: set[str], expected: set[str]) -> None:
    if saved != expected:
        raise CheckpointInvalid(
            f"{path} holds the state of another model: {len(expected - saved)} tensors are missing "
            f"{sorted(expected - saved)[:3]}, {len(saved - expected)} are unknown {sorted(saved - expected)[:3]}"
        )
