"""Copies of the trainer's state in host memory, from which a save reads the state of one moment during training.

Tensors of one kind (`kinds`) are saved as one stack, because DCP holds Python's lock for about 1 ms for every tensor.
"""

from __future__ import annotations

import re
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from math import prod
from threading import Event, Lock
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trireme.checkpoint.files import Bytes, huge_pages
from trireme.core.weights import padded

PAGING_THREADS = 8
MOMENTS = ("exp_avg", "exp_avg_sq")
REFERENCE = "reference."
STACKED_BYTES = 2**28
"""Largest size of a whole stack with its moments, unless it is of one parameter. Stacks are limited because a rank that
reads a part of a stack reads everything that another rank has written of this stack."""


def kinds(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Groups the tensors whose names differ only in numbers, and which have the same shape and dtype, into stacks of
    limited size. A stack is saved as one tensor, because saving takes time for each tensor. Returns {name of the stack:
    names of its tensors, sorted by the numbers in them}. A stack is named "FIRST..LAST", after its first and last
    tensor, or by the name of its only tensor.

    The result is the same for any number of ranks: shapes and STACKED_BYTES count whole tensors.
    """
    by_kind: dict[object, list[list[str]]] = {}
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        tensor = tensors[name]
        stacks = by_kind.setdefault((re.sub(r"\d+", "#", name), tensor.shape, tensor.dtype), [[]])
        if len(stacks[-1]) * tensor.numel() * tensor.element_size() >= STACKED_BYTES // (1 + len(MOMENTS)):
            stacks.append([])
        stacks[-1].append(name)
    return {
        names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}": names
        for stacks in by_kind.values()
        for names in stacks
    }


class Slab:
    """A block of host memory of `nbytes` bytes, private to this process, for the copies of the trainer's state that a
    save reads. `pinned`: the memory is page-locked, for copies from a GPU. Pinning takes seconds (the system maps each
    page and the GPU's driver locks it), so a thread pins the memory.

    (PyTorch rounds the size of its own pinned memory up to a power of two, which would take a third more memory.)
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._used = 0
        self._memory = np.frombuffer(huge_pages(max(nbytes, 1)), np.uint8)
        thread = ThreadPoolExecutor(1, "slab")
        self._ready = thread.submit(self._pin if pinned else int)
        thread.shutdown(wait=False)

    def _pin(self) -> int:
        with ThreadPoolExecutor(PAGING_THREADS, "pages") as pool:
            list(pool.map(lambda part: part.fill(0), np.array_split(self._memory, 8 * PAGING_THREADS)))
        address = self._memory.ctypes.data
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(self._memory), 0))
        weakref.finalize(self._memory, torch.cuda.cudart().cudaHostUnregister, address)
        return address

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor in the next free part of this memory. If the memory has to be pinned, first waits until it
        is."""
        self._ready.result()
        nbytes = prod(shape) * dtype.itemsize
        part = self._memory[self._used : self._used + nbytes]
        self._used += padded(nbytes)
        return torch.from_numpy(part).view(dtype).view(*shape)

    @staticmethod
    def size_of(tensors: Iterable[Tensor], count: int) -> int:
        """Returns the most bytes that `count` copies of this rank's part of each tensor can take, for any grouping of
        the copies into stacks."""
        return sum(count * padded(part.nbytes) for part in map(own_part, tensors))


def own_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor."""
    return cast(DTensor, tensor).to_local().detach()


class StagedTensor:
    """A live tensor of the state, and its copy in host memory. A live tensor that is away has no memory: only the copy
    has its value."""

    def __init__(self, host: Tensor, live: Tensor) -> None:
        self.host = host
        self.live = live
        self.address = host.data_ptr()
        self.nbytes = host.nbytes
        self.host_bytes: Bytes = host.view(-1).view(torch.uint8).numpy()  # shares the tensor's memory, as the next does
        self.readable = not live.is_cuda and live.is_contiguous()

    @property
    def live_bytes(self) -> Bytes:
        """The memory of a readable live tensor that is not away."""
        live: Bytes = self.live.view(-1).view(torch.uint8).numpy()
        return live

    @property
    def away(self) -> bool:
        return self.nbytes > self.live.untyped_storage().nbytes()


class Staging:
    """Buffers in host memory for copies of this rank's parts of all parameters, their moments, and the reference.

    `buffers`: {name under which a buffer is saved: the buffer, a DTensor}. A buffer has copies either of one stack of
    parameters (`kinds`) and their moments, or of one stack of the reference's tensors. It is sharded like the
    parameters, on a mesh of CPUs. `tensors`: each tensor in the buffers, with the live tensor that it copies.
    `moments`: the tensors of AdamW's moments.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.AdamW,
        reference: Mapping[str, Tensor],
        slab: Slab,
    ) -> None:
        self._slab = slab
        self.buffers: dict[str, Tensor] = {}
        self.tensors: list[StagedTensor] = []
        self.moments: list[StagedTensor] = []
        for kind, names in kinds(parameters).items():
            moments = [{name: optimizer.state[parameters[name]][moment] for name in names} for moment in MOMENTS]
            self._add(
                f"parameters.{kind}",
                [[tensors_by_name[name] for name in names] for tensors_by_name in (parameters, *moments)],
            )
            self.moments += self.tensors[-len(MOMENTS) * len(names) :]
        for kind, names in kinds(reference).items():
            self._add(REFERENCE + kind, [[reference[name] for name in names]])

    def _add(self, name: str, stacks: Sequence[Sequence[Tensor]]) -> None:
        """Makes the buffer `name`, one DTensor [stacks, tensors, ...] for copies of all `stacks`. Each stack is a list
        of tensors of one kind: parameters, their first moments, their second moments, or tensors of the reference. All
        stacks have the same number of tensors, and all tensors have the same shape and sharding."""
        live = [[own_part(tensor) for tensor in stack] for stack in stacks]
        first = live[0][0]
        sharded = cast(DTensor, stacks[0][0])
        local = self._slab.take((len(live), len(live[0]), *first.shape), first.dtype)
        placements = [Shard(p.dim + 2) if isinstance(p, Shard) else p for p in sharded.placements]
        whole = torch.empty((*local.shape[:2], *sharded.shape), device="meta")
        mesh = DeviceMesh("cpu", sharded.device_mesh.mesh, _init_backend=False)  # only says which rank has which part
        self.buffers[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        host = [part for stack in local.unbind() for part in stack.unbind()]
        self.tensors += map(StagedTensor, host, [tensor for stack in live for tensor in stack])


class StateSnapshot:
    """The values of `tensors` at the time of its construction. A save reads them through `copy`, each byte once, in the
    order of the host copies.

    As long as a live tensor has not changed, `copy` reads from it. Call `keep` before a change: it copies to host
    memory the bytes that the save has not read yet. At the start of the save, `begin` copies the tensors that cannot be
    read in place, such as a GPU's. `stream`: the GPU stream for these copies. A tensor that is away is in its host copy
    already.
    """

    def __init__(self, tensors: Sequence[StagedTensor], stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._tensors = sorted((tensor for tensor in tensors if tensor.nbytes), key=lambda tensor: tensor.address)
        self._addresses = [tensor.address for tensor in self._tensors]
        self._copied = [tensor.away for tensor in self._tensors]
        self._read_bytes = [0] * len(self._tensors)
        self._lock = Lock()
        self._host_free = Event()
        self._over = False

    def host_is_free(self) -> None:
        """Allows writing to the host copies. Call this after the previous save has finished reading them."""
        self._host_free.set()

    def end(self) -> None:
        """Marks this snapshot's save as ended: nothing reads the snapshot any more, so `keep` copies nothing."""
        self._over = True
        self._host_free.set()

    def begin(self) -> None:
        self._keep([i for i, tensor in enumerate(self._tensors) if not tensor.readable])

    def begin_keep(self) -> None:
        """Begins what `keep` does, and does not wait for copies from a GPU. The host copies must be free."""
        self._keep(range(len(self._tensors)), waits=False)

    def keep(self) -> None:
        """Copies to host memory the bytes that the save has not read yet, so that the live tensors may change. Waits
        for the previous save while it still reads the host copies."""
        self._host_free.wait()
        if not self._over:
            self._keep(range(len(self._tensors)))

    @torch.no_grad()
    def _keep(self, indices: Sequence[int], *, waits: bool = True) -> None:
        # With None as the stream, torch would still look for a GPU.
        with self._lock, torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for i in indices:
                tensor = self._tensors[i]
                if not self._copied[i] and self._read_bytes[i] < tensor.nbytes:
                    tensor.host.copy_(tensor.live, non_blocking=True)
                    self._copied[i] = True
            if self._stream and waits:
                self._stream.synchronize()

    def copy(self, to: Bytes, target: Bytes) -> None:
        """Copies into `to` the bytes that a save writes to its file. `target`: the memory whose contents the save was
        asked to write. If `target` lies in the host copies, copies the snapshot's bytes: from the host copy if it is
        filled, else from the live tensor. If `target` is any other memory, copies the bytes in it."""
        address = target.__array_interface__["data"][0]
        while len(target):
            i = bisect_right(self._addresses, address) - 1
            start = address - self._addresses[i]
            if i < 0 or start >= self._tensors[i].nbytes:
                np.copyto(to, target)
                return
            tensor = self._tensors[i]
            count = min(tensor.nbytes - start, len(target))
            with self._lock:
                if tensor.readable and not self._copied[i]:
                    source = tensor.live_bytes
                else:
                    source = tensor.host_bytes
                np.copyto(to[:count], source[start : start + count])
                self._read_bytes[i] = start + count
            to = to[count:]
            target = target[count:]
            address = address + count
