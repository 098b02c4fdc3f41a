"""The trainer's part of a checkpoint: weights, AdamW's state and random generators, by torch.distributed.checkpoint
(DCP).

Saved are, under these names, for any number of ranks to read:
  parameters.<names>     [3, n, *shape], in the dtype of the master weights: n parameters of one kind, all of the same
                         shape (`trainer.snapshot.kinds`), and AdamW's exp_avg and exp_avg_sq of them, stacked
  reference.<names>      [1, n, *shape]: of a reference policy that changes (`trainer.kl.reference.update_every`)
  buffers.<name>         the persistent buffers of a whole model, and a flag: gradients were summed whole
  base                   [16], uint8: for adapters, the digest of the weights they belong to
  steps                  [parameters], float32: AdamW's count of steps of each, in order of name
  random.<rank>.<kind>   see `random_state`

A save runs alongside training, and training has priority. Each save has two threads. One runs DCP's Python code, which
must be short because other Python code waits for it. The other hashes and writes, almost without Python, in the time
that training leaves. The state does not change between two optimiser steps, so the save writes it directly from the
memory of the live tensors, in one pass; `optim_step` first copies the unwritten rest to buffers in host memory
(`trainer.snapshot`). These buffers are made at the first save and reused. A GPU's state is copied to them when the save
begins. DCP's collectives have a separate process group.

The host buffers also hold AdamW's moments while another process needs the GPU's memory (`put_moments_away`). A save
that begins meanwhile reads them there.

An error while one rank copies or writes is raised on all ranks, and leaves them ready for the next save: DCP brings
errors to every rank if they occur inside the hooks that it calls. Therefore a GPU's state is copied in such a hook.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem

from trainer.mesh import Mesh
from trainer.snapshot import MOMENTS, REFERENCE, Slab, Staging, StateSnapshot, own_part
from trainer.state_reader import StateReader
from trireme.checkpoint.files import Copy, FileRecord, HashingWriter, fsync_directory, make_directory, storage_errors
from trireme.checkpoint.parts import CheckpointSource, PartReader
from trireme.config import CommonConfig
from trireme.core.errors import CheckpointInvalid, StorageFailed
from trireme.process.environ import yield_to_others
from trireme.process.faults import fault_point

BUFFERS = "buffers."


def make_adam_state(optimizer: torch.optim.AdamW, *, away: bool = False) -> None:
    """Makes AdamW's state (moments and count of steps, all 0) before the first step, so that the state can be saved or
    overwritten by a load. `away`: True if the moments get no memory yet; host copies that are 0 then hold them.

    (DCP's own way is a step with gradients of zero, after which AdamW counts one step too many.)
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
        for moment in moments.values() if away else ():
            own_part(moment).untyped_storage().resize_(0)
        optimizer.state[parameter] = {"step": torch.tensor(0.0, device=parameter.device), **moments}


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of torch's, numpy's and Python's random generators, and of the generator of `device` if it is
    a GPU. torch's are uint8, the others float64 (their words have 32 bits, which float64 holds exactly; NaN stands
    for Python's None)."""
    _, words, position, has_gauss, gauss = np.random.get_state()
    _, python_words, python_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*words, position, has_gauss, gauss], dtype=torch.float64),
        "python": torch.tensor([*python_words, np.nan if python_gauss is None else python_gauss], dtype=torch.float64),
    }
    if device.type == "cuda":
        return {**state, "cuda": torch.cuda.get_rng_state(device)}
    return state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Sets the random generators for which `state`, from `random_state`, has entries; leaves the others unchanged."""
    if "torch" in state:  # and so the others, which every process has
        torch.set_rng_state(state["torch"])
        *words, position, has_gauss, gauss = state["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), int(position), int(has_gauss), gauss))
        *words, gauss = state["python"].tolist()
        random.setstate((3, tuple(int(word) for word in words), None if np.isnan(gauss) else gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


class RecordingFileSystem(FileSystem):
    """DCP's file system for writing: hashes files as they are written, forces them onto the disk, and records them.

    `begin` is called before the first file is opened; `thread` hashes and writes; `copy` copies the bytes to write
    (`HashingWriter`). Raises StorageFailed instead of OSError.
    """

    def __init__(self, begin: Callable[[], None], thread: ThreadPoolExecutor, copy: Copy) -> None:
        self._begin = begin
        self._thread = thread
        self._copy = copy
        self._written: dict[Path, HashingWriter] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb", f"only for writing, got mode {mode}"
        if not self._written:
            self._begin()
        with storage_errors(path):
            with HashingWriter(path, self._thread, self._copy) as stream:
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
        """Returns the records of all files written, with paths DIRECTORY/FILE."""
        return [stream.record(f"{path.parent.name}/{path.name}") for path, stream in sorted(self._written.items())]


class Checkpointer:
    """Saves and loads one rank's part of the trainer's state. The constructor, `begin` and `load` are collective.

    `parameters`: the sharded trained parameters by name; `optimizer` has their state (`make_adam_state`). `reference`:
    the tensors of a changing reference policy, by name. `base`: the digest of the base weights if the parameters are
    adapters; None if they are the whole model. `buffers`: further tensors to save, by name. `away`: the argument of
    `make_adam_state`.
    """

    def __init__(
        self,
        config: CommonConfig,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.AdamW,
        reference: Mapping[str, Tensor],
        base: str | None,
        buffers: Mapping[str, Tensor],
        *,
        away: bool = False,
    ) -> None:
        self._beside_training = config.checkpoint.async_save
        self._device = mesh.device
        self._random_prefix = f"random.{mesh.rank}."
        self._base = base
        self._parameters = dict(sorted(parameters.items()))
        self._steps = [optimizer.state[parameter]["step"] for parameter in self._parameters.values()]
        self._optimizer = optimizer
        self._reference = reference
        self._buffers = {BUFFERS + name: buffer for name, buffer in buffers.items()}
        self._group = mesh.new_cpu_group(config.timeouts.checkpoint_s)
        self._stream = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
        copies = Slab.size_of(self._parameters.values(), 1 + len(MOMENTS)) + Slab.size_of(reference.values(), 1)
        self._slab = Slab(copies, pinned=any(own_part(tensor).is_cuda for tensor in parameters.values()))
        self._saves: dict[Path, Future[list[FileRecord]]] = {}
        self._newest: Future[list[FileRecord]] | None = None
        self._snapshot: StateSnapshot | None = None
        self._moments_away = away
        self._leaving: StateSnapshot | None = None  # of the moments, while they are copied to leave

    def begin(self, path: Path) -> None:
        """Begins to save the current state into directory `path`; does not wait. A thread writes the files, once any
        earlier save has ended."""
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        state = {**self._staging.buffers, **self._small_state()}
        snapshot = self._snapshot = StateSnapshot(self._staging.tensors, self._stream)
        if self._newest is None or self._newest.done():
            snapshot.host_is_free()
        thread = ThreadPoolExecutor(1, "save")
        self._newest = self._saves[path] = thread.submit(self._save, path, state, snapshot, self._newest)
        thread.shutdown(wait=False)  # it ends with the save

    def finish(self, path: Path) -> list[FileRecord]:
        """Waits until this rank's files in `path` are on the disk; returns their records. Raises StorageFailed if any
        rank failed."""
        return self._saves.pop(path).result()

    def wait_until_saved(self) -> None:
        """Waits until no save is running. Does not raise if the save failed."""
        wait([self._newest] if self._newest else [])

    def keep(self) -> None:
        """Prepares a change of the state, and has to be called before each: copies to host memory the part of the state
        that a running save has not read yet, and brings back moments that are away."""
        if self._snapshot:
            self._snapshot.keep()
            self._snapshot = None
        self._leaving = None
        self.bring_moments_back()
        if self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)

    def begin_to_put_moments_away(self) -> None:
        """Begins to copy AdamW's moments to their host copies, and does not wait: `put_moments_away` does. Does nothing
        if a save is running, because it reads the host copies."""
        if self._newest and not self._newest.done():
            return
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._leaving = StateSnapshot(self._staging.moments, self._stream)
        self._leaving.host_is_free()
        self._leaving.begin_keep()

    def put_moments_away(self) -> None:
        """Moves AdamW's moments to their host copies, and frees their memory on the device. First waits until no save
        is running."""
        self.wait_until_saved()
        if not self._leaving:
            self.begin_to_put_moments_away()
        assert self._leaving
        self._leaving.keep()
        self._leaving = None
        for moment in self._staging.moments:
            moment.live.untyped_storage().resize_(0)
        self._moments_away = True

    @torch.no_grad()
    def bring_moments_back(self) -> None:
        """Begins to copy moments that are away back to the device, and does not wait: `keep` does. Does nothing if the
        moments are there."""
        if not self._moments_away:
            return
        self._moments_away = False
        for moment in self._staging.moments:
            moment.live.untyped_storage().resize_(moment.nbytes)
        if self._stream:  # the memory may have been another tensor's just now
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for moment in self._staging.moments:
                moment.live.copy_(moment.host, non_blocking=True)

    def reset_moments(self) -> None:
        """Sets AdamW's moments and its count of steps to 0; a running save still gets the old values."""
        self.keep()
        for state in self._optimizer.state.values():
            torch._foreach_zero_(list(state.values()))

    def load(self, path: Path, source: CheckpointSource | None = None) -> None:
        """Loads the state that any number of ranks saved in `path`; a rank that does not see `path` reads from
        `source`. State that the checkpoint does not have stays unchanged: the random generators of ranks that did not
        exist then, or a reference that was not saved. Raises CheckpointInvalid if the state is of another model or
        cannot be read, and StorageFailed."""
        self.wait_until_saved()  # frees the buffers
        with PartReader.opened(path, source) as part:
            small = self._read(path, part)
        if self._base and (digest := bytes(small["base"].tolist()).hex()) != self._base:
            raise CheckpointInvalid(
                f"{path} holds adapters for a base model with digest {digest}, but model.name has digest {self._base}: "
                "set model.name to the model that the run began with"
            )
        self._take_over(small)

    def _read(self, path: Path, part: PartReader) -> dict[str, Tensor]:
        """Reads a saved state through `part` into the host copies (`Staging`). Returns the small tensors by name:
        steps, the tensors of `buffers`, base and random generators. `path` names the checkpoint in errors. Raises
        CheckpointInvalid, StorageFailed."""
        reader = StateReader(part)
        saved = set(reader.read_metadata().state_dict_metadata)
        expected = {*self._staging.buffers, *self._buffers, "steps", *(["base"] if self._base else [])}
        _refuse_other_tensors(path, saved, expected)
        current = StateSnapshot(self._staging.tensors, self._stream)
        current.host_is_free()
        current.keep()  # so that what was not saved is copied back unchanged
        small = {name: tensor for name, tensor in self._small_state().items() if name in saved}
        state = {**{name: buffer for name, buffer in self._staging.buffers.items() if name in saved}, **small}
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        try:
            dcp.load(state, storage_reader=reader, planner=planner, process_group=self._group)
        except dcp.CheckpointException as error:
            cause = _cause(error)
            if isinstance(cause, StorageFailed):
                raise cause from None
            raise CheckpointInvalid(f"cannot load the trainer's state from {path}: {cause}") from None
        return small

    @cached_property
    def _staging(self) -> Staging:
        return Staging(self._parameters, self._optimizer, self._reference, self._slab)

    def _small_state(self) -> dict[str, Tensor]:
        """Returns copies of the small tensors of the state, by name: steps, the tensors of `buffers`, base and random
        generators."""
        generators = {self._random_prefix + kind: tensor for kind, tensor in random_state(self._device).items()}
        if self._base:
            base = {"base": torch.tensor(list(bytes.fromhex(self._base)), dtype=torch.uint8)}
        else:
            base = {}
        buffers = {name: buffer.cpu().clone() for name, buffer in self._buffers.items()}
        return {"steps": torch.stack(self._steps).cpu(), **buffers, **base, **generators}

    @torch.no_grad()
    def _take_over(self, small: Mapping[str, Tensor]) -> None:
        """Sets the live state to the values of the host copies and of `small`, the small tensors by name. Moments that
        are away stay there."""
        for tensor in self._staging.tensors:
            if not tensor.away:
                tensor.live.copy_(tensor.host)
        torch._foreach_copy_(self._steps, list(small["steps"].unbind()))
        for name, buffer in self._buffers.items():
            buffer.copy_(small[name])
        prefix = self._random_prefix
        set_random_state({name.removeprefix(prefix): t for name, t in small.items() if name.startswith(prefix)})

    def _save(
        self, path: Path, state: dict[str, Tensor], snapshot: StateSnapshot, before: Future[list[FileRecord]] | None
    ) -> list[FileRecord]:
        wait([before] if before else [])
        snapshot.host_is_free()
        # Files have checksums of their own. torch's, of each tensor, would take longer than all of the copying.
        torch.serialization.set_crc32_options(False)  # of this thread
        with ThreadPoolExecutor(1, "write", yield_to_others if self._beside_training else None) as thread:

            def begin() -> None:
                thread.submit(snapshot.begin).result()
                fault_point("trainer.save")

            # Not `sync_files`: DCP would force every file of the machine onto its disks; the streams sync their own.
            writer = dcp.FileSystemWriter(path, sync_files=False, per_thread_copy_ahead=0, overwrite=False)
            writer.fs = files = RecordingFileSystem(begin, thread, snapshot.copy)
            planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
            try:
                dcp.save(state, storage_writer=writer, planner=planner, process_group=self._group)
            except dcp.CheckpointException as error:
                raise _cause(error) from None
            finally:
                snapshot.end()
        return files.records()


def _cause(error: dcp.CheckpointException) -> Exception:
    """Returns one error from DCP's exception, which has the errors of all ranks: a StorageFailed if there is one, else
    a RuntimeError with the first error and the number of its shard. (`except Exception` does not catch DCP's
    exception.)"""
    rank, (first, _) = next(iter(error.failures.items()))
    storage = (cause for cause, _ in error.failures.values() if isinstance(cause, StorageFailed))
    return next(storage, RuntimeError(f"shard {rank}: {type(first).__name__}: {first}"))


def _refuse_other_tensors(path: Path, saved: set[str], expected: set[str]) -> None:
    """Raises CheckpointInvalid unless `saved` and `expected` are the same names, apart from random generators and
    reference. `path` names the checkpoint in the error."""
    missing, unknown = (
        sorted(name for name in names if not name.startswith(("random.", REFERENCE)))
        for names in (expected - saved, saved - expected)
    )
    if missing or unknown:
        raise CheckpointInvalid(
            f"{path} holds the state of another model: {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(unknown)} are unknown {unknown[:3]}"
        )
