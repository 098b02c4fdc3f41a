"""The trainer's part of a commit: weights, AdamW's state and random generators, by torch.distributed.checkpoint (DCP).

What is saved, under these names; any number of ranks can read it:
  parameters.<names>     [3, n, *shape], in the dtype of the master weights: n parameters of one kind, all of the same
                         shape (`kinds`), and AdamW's exp_avg and exp_avg_sq of them, stacked
  reference.<names>      [1, n, *shape]: of a reference policy that changes (`trainer.kl.reference.update_every`)
  base                   [16], uint8: where the parameters are adapters, the digest of the weights they belong to
  steps                  [parameters], float32: AdamW's count of steps of each, in order of name
  random.<rank>.<kind>   see `random_state`
(Stacked, because what DCP does for every tensor it writes costs about 1 ms in which no other Python code runs.)

A save writes what this rank holds while training goes on, and training comes first. So there are two threads for each
save. One is for DCP's Python code, which must be done with soon: other Python code waits for it. The other hashes and
writes, almost without Python, in the time that training leaves. Nothing of the state changes between one optimiser step
and the next, so until then it is written from where it lies, in one pass over the memory; what is not yet written when
`optim_step` comes, it first copies to buffers in host memory (`Snapshot`). These are made at the first save and used
again. The state of a GPU is copied to them at once. DCP's collectives have a process group of their own, so that they
never mix with training's.

What goes wrong while one rank copies or writes is raised on all of them, and leaves them ready for the next save: DCP
brings such errors to every rank as long as they come up inside the hooks that it calls. So a GPU's copy is made in one.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trireme.checkpoint.files import (
    Bytes,
    Copy,
    FileRecord,
    HashingWriter,
    fsync_directory,
    make_directory,
    storage_errors,
)
from trireme.core.errors import CheckpointInvalid, StorageFailed
from trireme.process.faults import fault_point
from trireme.process.priority import yield_to_others

MOMENTS = ("exp_avg", "exp_avg_sq")
REFERENCE = "reference."
STACKED_BYTES = 2**28
"""Of the whole of what is saved under one name, unless it is one parameter: a rank that reads a part of it reads all
that another one has written of it."""


def make_adam_state(optimizer: torch.optim.AdamW) -> None:
    """Makes the state that AdamW otherwise makes at its first step, so that there is one to save, or to load into.

    (DCP's own way is a step with gradients of zero, after which AdamW counts one step too many.)
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(0.0, device=parameter.device), **moments}


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of this process' random generators, that of `device` too if it is a GPU: torch's uint8, numpy's and
    Python's as numbers, float64.

    (Their words have 32 bits, which float64 holds exactly; NaN stands for Python's None.)
    """
    _, words, position, has_gauss, gauss = np.random.get_state()
    _, python_words, python_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*words, position, has_gauss, gauss], dtype=torch.float64),
        "python": torch.tensor([*python_words, np.nan if python_gauss is None else python_gauss], dtype=torch.float64),
    }
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


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
    """DCP's file system for writing: files are hashed on their way, forced onto the disk, and recorded. `thread` does
    what takes long.

    Raises StorageFailed instead of OSError.
    """

    def __init__(self, thread: ThreadPoolExecutor, copy: Copy) -> None:
        self._thread, self._copy = thread, copy
        self._written: dict[Path, HashingWriter] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb", f"only for writing, got mode {mode}"
        with storage_errors(path):
            with HashingWriter(path, self._thread, self._copy, large=True) as stream:
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
    """Writes one file per rank, and rank 0 the table of all. `begin` is called before the data is written; `copy`
    copies its bytes (`HashingWriter`)."""

    fs: RecordingFileSystem

    def __init__(self, path: Path, begin: Callable[[], None], thread: ThreadPoolExecutor, copy: Copy) -> None:
        # Not `sync_files`: DCP would force every file of the machine onto its disks; the streams do it for their own.
        super().__init__(path, sync_files=False, per_thread_copy_ahead=0, overwrite=False)
        self.fs = RecordingFileSystem(thread, copy)
        self._begin = begin

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future[list[Any]]:
        self._begin()
        fault_point("trainer.save")
        return super().write_data(plan, planner)


def kinds(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The names of `tensors` by kind: names that differ in their numbers alone, in the order of these, and whose
    tensors have the same shape and dtype. The key is the first name, and the last where there are several.

    The same for any number of ranks: shapes are those of whole tensors, of which there are STACKED_BYTES in a kind."""
    found: dict[Any, list[list[str]]] = {}
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        tensor = tensors[name]
        stacks = found.setdefault((re.sub(r"\d+", "#", name), tensor.shape, tensor.dtype), [[]])
        if len(stacks[-1]) * tensor.numel() * tensor.element_size() >= STACKED_BYTES // (1 + len(MOMENTS)):
            stacks.append([])
        stacks[-1].append(name)
    return {
        names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}": names
        for stacks in found.values()
        for names in stacks
    }


class Part:
    """One tensor of the state (`live`) and where it is copied to (`host`). `on_host`: it can be read where it lies."""

    def __init__(self, host: Tensor, live: Tensor) -> None:
        self.host, self.live = host, live
        self.on_host = not live.is_cuda and live.is_contiguous()
        self.address, self.nbytes = host.data_ptr(), host.nbytes
        self.host_bytes = host.view(-1).view(torch.uint8).numpy()  # the same memory, as the next
        self.live_bytes = live.view(-1).view(torch.uint8).numpy() if self.on_host else None


class Staging:
    """Room in host memory for what this rank holds of each parameter and its moments, and of the reference.

    `buffers`: by the name under which it is saved, sharded as the parameter is, over the same ranks' CPUs. `parts`:
    theirs, and the tensors that those are copies of.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW, reference: Mapping[str, Tensor]
    ) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.parts: list[Part] = []
        for kind, names in kinds(parameters).items():
            moments = [{name: optimizer.state[parameters[name]][moment] for name in names} for moment in MOMENTS]
            self._add(f"parameters.{kind}", [[each[name] for name in names] for each in (parameters, *moments)])
        for kind, names in kinds(reference).items():
            self._add(REFERENCE + kind, [[reference[name] for name in names]])

    def _add(self, name: str, stacks: Sequence[Sequence[Tensor]]) -> None:
        live = [[_local(tensor) for tensor in stack] for stack in stacks]
        first = live[0][0]
        local = torch.empty((len(live), len(live[0]), *first.shape), dtype=first.dtype, pin_memory=first.is_cuda)
        self.buffers[name] = _stacked(local, stacks[0][0])
        host = [part for stack in local.unbind() for part in stack.unbind()]
        self.parts += map(Part, host, [tensor for stack in live for tensor in stack])


def _local(tensor: Tensor) -> Tensor:
    """This rank's part: the same memory."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def _stacked(local: Tensor, parameter: Tensor) -> Tensor:
    """`local`, [a, b, ...] parts of tensors that are sharded like `parameter`, as this rank's part of their stack."""
    assert isinstance(parameter, DTensor)
    placements = [Shard(p.dim + 2) if isinstance(p, Shard) else p for p in parameter.placements]
    whole = torch.empty((*local.shape[:2], *parameter.shape), device="meta")
    mesh = DeviceMesh("cpu", parameter.device_mesh.mesh, _init_backend=False)  # only says who has what
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


class Snapshot:
    """The `live` tensors of `parts` as they are now, for a save that reads each byte of them once, in order, as if it
    lay in the `host` tensors: it is read from where it is (`copy`). Who is about to change the live ones calls `keep`
    before, and what is not yet read then is copied to the host's. So are first of all (`begin`) those that cannot be
    read where they are, of a GPU, in `stream`.
    """

    def __init__(self, parts: Sequence[Part], stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._parts = sorted((part for part in parts if part.nbytes), key=lambda part: part.address)
        self._addresses = [part.address for part in self._parts]
        self._kept, self._read = [False] * len(self._parts), [0] * len(self._parts)  # read: so many bytes
        self._lock = Lock()
        self._free, self._over = Event(), False

    def host_is_free(self) -> None:
        """What the save before has to say."""
        self._free.set()

    def end(self) -> None:
        """The save is over: nobody reads any more."""
        self._over = True
        self._free.set()

    def begin(self) -> None:
        self._keep([i for i, part in enumerate(self._parts) if not part.on_host])

    def keep(self) -> None:
        """From now on the live tensors may change. Waits for the save before, if that still reads from the host's."""
        self._free.wait()
        if not self._over:
            self._keep(range(len(self._parts)))

    @torch.no_grad()
    def _keep(self, indices: Sequence[int]) -> None:
        # Asked for no stream, torch would still look for a GPU.
        with self._lock, torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for i in indices:
                part = self._parts[i]
                if not self._kept[i] and self._read[i] < part.nbytes:
                    part.host.copy_(part.live, non_blocking=True)
                    self._kept[i] = True
            if self._stream:
                self._stream.synchronize()

    def copy(self, to: Bytes, wanted: Bytes) -> None:
        """Copies to `to` what `wanted`, of the host tensors' memory, or of any other, is to hold."""
        address = wanted.__array_interface__["data"][0]
        while len(wanted):
            i = bisect_right(self._addresses, address) - 1
            start = address - self._addresses[i]
            if i < 0 or start >= self._parts[i].nbytes:
                np.copyto(to, wanted)
                return
            part = self._parts[i]
            count = min(part.nbytes - start, len(wanted))
            with self._lock:
                here = part.live_bytes if part.live_bytes is not None and not self._kept[i] else part.host_bytes
                np.copyto(to[:count], here[start : start + count])
                self._read[i] = start + count
            to, wanted, address = to[count:], wanted[count:], address + count


class Checkpointer:
    """Saves and loads one rank's part of the trainer's state. Constructing it, `begin` and `load` are collective.

    `parameters` are the sharded ones by name, `optimizer` has its state already. `reference`: the tensors of the
    reference policy that change, by name. `timeout_s` is for DCP's collectives. `beside_training`: nobody waits for a
    save. `device`: where the state is. `base`: digest of the weights that the parameters are adapters of; none = they
    are the whole model.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.AdamW,
        reference: Mapping[str, Tensor],
        timeout_s: float,
        beside_training: bool,
        device: torch.device,
        base: str | None = None,
    ) -> None:
        self._beside_training = beside_training
        self._device = device
        self._base = base
        self._parameters = dict(sorted(parameters.items()))
        self._steps = [optimizer.state[parameter]["step"] for parameter in self._parameters.values()]
        self._optimizer = optimizer
        self._reference = reference
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._saves: dict[Path, Future[list[FileRecord]]] = {}
        self._newest: Future[list[FileRecord]] | None = None
        self._snapshot: Snapshot | None = None

    def begin(self, path: Path) -> None:
        """Begins to save into directory `path` the state as it is now; after another save that is not yet done."""
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        state = {**self._staging.buffers, **self._small_state()}
        snapshot = self._snapshot = self._now()
        if self._newest is None or self._newest.done():
            snapshot.host_is_free()
        thread = ThreadPoolExecutor(1, "save")
        self._newest = self._saves[path] = thread.submit(self._save, path, state, snapshot, self._newest)
        thread.shutdown(wait=False)  # it ends with the save

    def finish(self, path: Path) -> list[FileRecord]:
        """Waits until this rank's files in `path` are on the disk. Raises StorageFailed, also for another rank."""
        return self._saves.pop(path).result()

    def wait_until_saved(self) -> None:
        """Waits until no save is under way, however it ends."""
        wait([self._newest] if self._newest else [])

    def keep(self) -> None:
        """From now on the state may change: what a save that has begun still needs of it is copied."""
        if self._snapshot:
            self._snapshot.keep()
            self._snapshot = None

    def load(self, path: Path) -> None:
        """Reads what was saved in `path`, by any number of ranks; those that had no counterpart then keep their random
        generators as they are, and a reference that was not saved stays as it is. Raises CheckpointInvalid when it is
        the state of another model, or cannot be read."""
        self.wait_until_saved()  # then the buffers are free
        reader = dcp.FileSystemReader(path)
        saved = set(reader.read_metadata().state_dict_metadata)
        expected = {*self._staging.buffers, "steps", *(["base"] if self._base else [])}
        _refuse_other_tensors(path, _of_the_model(saved), _of_the_model(expected))
        now = self._now()
        now.host_is_free()
        now.keep()  # so that taking over what was not saved changes nothing
        small = {name: tensor for name, tensor in self._small_state().items() if name in saved}
        state = {**{name: buffer for name, buffer in self._staging.buffers.items() if name in saved}, **small}
        try:
            dcp.load(
                state,
                storage_reader=reader,
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
                process_group=self._group,
            )
        except dcp.CheckpointException as error:
            raise CheckpointInvalid(f"cannot load the trainer's state from {path}: {_cause(error)}") from None
        if self._base:
            _refuse_other_base(path, bytes(small["base"].tolist()).hex(), self._base)
        self._take_over(small)

    @cached_property
    def _staging(self) -> Staging:
        return Staging(self._parameters, self._optimizer, self._reference)

    def _now(self) -> Snapshot:
        return Snapshot(self._staging.parts, self._stream)

    def _small_state(self) -> dict[str, Tensor]:
        """Copies of what is copied at once."""
        generators = {self._random_prefix + kind: tensor for kind, tensor in random_state(self._device).items()}
        base = {"base": torch.tensor(list(bytes.fromhex(self._base)), dtype=torch.uint8)} if self._base else {}
        return {"steps": torch.stack(self._steps).cpu(), **base, **generators}

    @torch.no_grad()
    def _take_over(self, small: Mapping[str, Tensor]) -> None:
        """The buffers' contents and `small` become the state."""
        for part in self._staging.parts:
            part.live.copy_(part.host)
        torch._foreach_copy_(self._steps, list(small["steps"].unbind()))
        prefix = self._random_prefix
        set_random_state({name.removeprefix(prefix): t for name, t in small.items() if name.startswith(prefix)})

    @property
    def _random_prefix(self) -> str:
        return f"random.{dist.get_rank()}."

    def _save(
        self, path: Path, state: dict[str, Tensor], snapshot: Snapshot, before: Future[list[FileRecord]] | None
    ) -> list[FileRecord]:
        wait([before] if before else [])
        snapshot.host_is_free()
        # Files have checksums of their own. Those within, of each tensor, would take longer than all of the copying.
        torch.serialization.set_crc32_options(False)  # of this thread
        with ThreadPoolExecutor(1, "write", yield_to_others if self._beside_training else None) as thread:
            writer = Writer(path, lambda: thread.submit(snapshot.begin).result(), thread, snapshot.copy)
            try:
                dcp.save(
                    state,
                    storage_writer=writer,
                    planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
                    process_group=self._group,
                )
            except dcp.CheckpointException as error:
                raise _cause(error) from None
            finally:
                snapshot.end()
        return writer.fs.records()


def _cause(error: dcp.CheckpointException) -> Exception:
    """What went wrong on the rank that it went wrong on; a failure of storage before others. (DCP's own exception is
    none that `except Exception` catches.)"""
    causes = [(rank, cause) for rank, (cause, _) in error.failures.items()]
    for _, cause in causes:
        if isinstance(cause, StorageFailed):
            return cause
    rank, cause = causes[0]
    return RuntimeError(f"shard {rank}: {type(cause).__name__}: {cause}")


def _of_the_model(names: set[str]) -> set[str]:
    """Those that each save of the same model has, whatever its ranks and its reference."""
    return {name for name in names if not name.startswith(("random.", REFERENCE))}


def _refuse_other_base(path: Path, saved: str, expected: str) -> None:
    if saved != expected:
        raise CheckpointInvalid(
            f"{path} holds adapters of another base, whose weights have digest {saved}; those of model.name have "
            f"{expected}: give the model that the run began with"
        )


def _refuse_other_tensors(path: Path, saved: set[str], expected: set[str]) -> None:
    if saved != expected:
        raise CheckpointInvalid(
            f"{path} holds the state of another model: {len(expected - saved)} tensors are missing "
            f"{sorted(expected - saved)[:3]}, {len(saved - expected)} are unknown {sorted(saved - expected)[:3]}"
        )
