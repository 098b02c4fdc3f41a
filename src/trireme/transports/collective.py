"""Groups in which one process, the root, sends the same bytes to all others: over TCP, or between GPUs.

Why not torch's NCCL group: its watchdog ends the process when a peer has died, and here a peer is a replica, which may
die. vLLM's communicator waits without a deadline, and the trainer does not import vLLM. So NCCL's own few functions
are called, without blocking, from the library that PyTorch has loaded.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from trireme.core.errors import RoomFailed
from trireme.process.interfaces import gloo_interface

ROOT = 0
LOOKS = 8
"""A call that has lasted t seconds is checked again after t / LOOKS seconds. So its end is noticed late by at most an
eighth of its time, or by SHORTEST_S if that is longer."""
SHORTEST_S = 2e-5
LONGEST_S = 0.001
"""Bounds of the pause between two checks, in seconds."""
PIECE_BYTES = 2**20
CONNECTING = 5
"""gloo waits this multiple of its timeout for a member to connect (`Pair::waitUntil` in its tcp/pair.cc), for example a
member that died after it had sent its address."""


def pause_between_looks(waited_s: float, longest_s: float = LONGEST_S) -> float:
    """Returns how long to pause, in seconds, before checking again if a call has ended. `waited_s`: how long the call
    has lasted so far, in seconds. The pause is at most `longest_s` seconds."""
    return min(max(waited_s / LOOKS, SHORTEST_S), longest_s)


class GlooCollective:
    """A group over TCP, as a chain: each member passes arrived bytes on to the next member, in pieces, so that at most
    one copy leaves each member. (gloo's own broadcast sends whole messages down a tree: in a group of n members, the
    root sends log2(n) copies.) Constructing the object is collective.

    If a member's successor is lost, the member still receives; members behind the successor do not. A send to a stopped
    process cannot be aborted and ends at its deadline. The sockets of the group end with the last reference to it.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, interface: str) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its stub names another class
        options._devices = [ProcessGroupGloo.create_device(interface=interface)]
        options._timeout = timedelta(seconds=timeout_s / CONNECTING)
        options._threads = 1
        self._before = rank - 1
        self._behind = rank + 1 if rank + 1 < size else None
        self._next_tag = 0
        self._passing: list[Any] = []  # sends that nobody has waited for
        self._cut = ""  # why nothing is passed on any more
        try:
            self._group: Any = ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise RoomFailed(f"the {size} processes of a broadcast of weights did not all connect: {error}") from error

    def broadcast(self, buffer: Tensor, timeout_s: float) -> None:
        """Sends the root's `buffer` (uint8) to the other members, which receive it into their own `buffer`.

        Raises RoomFailed in three cases: `timeout_s` seconds have passed; the member before this one in the chain is
        lost; at the root, the next member is lost. Call `abort` after a RoomFailed.
        """
        group = self._group  # destroying it waits for its thread: this one may have to do that, `abort` never
        if group is None:
            raise RoomFailed("the group was given up")
        deadline = time.monotonic() + timeout_s
        pieces = list(enumerate(buffer.split(PIECE_BYTES), start=self._next_tag))
        self._next_tag += len(pieces)
        try:
            # All are asked for in advance: a send waits until it is asked for, else for a round trip each time.
            if self._before >= 0:
                arriving = [group.recv([piece], self._before, tag) for tag, piece in pieces]
            else:
                arriving = []
            for number, (tag, piece) in enumerate(pieces):
                if arriving:
                    _wait(arriving[number], deadline)
                self._pass_on(group, piece, tag)
        except RuntimeError as error:
            raise RoomFailed(f"a broadcast of {buffer.nbytes} bytes failed: {error}") from error
        if self._before < 0:
            self.finish(timeout_s)

    def _pass_on(self, group: Any, piece: Tensor, tag: int) -> None:
        if self._behind is None or self._cut:
            return
        try:
            self._passing.append(group.send([piece], self._behind, tag))
        except RuntimeError as error:
            self._cut = str(error)

    def finish(self, timeout_s: float) -> None:
        """Waits until this member has passed on all buffers. Do not write to a buffer before that.

        The root need not call this: its `broadcast` already waits. Raises RoomFailed after `timeout_s` seconds, or if
        the next member is lost; call `abort` then.
        """
        deadline = time.monotonic() + timeout_s
        passing = self._passing
        self._passing = []
        try:
            for sent in passing:
                _wait(sent, deadline)
        except RuntimeError as error:
            self._cut = self._cut or str(error)
        if self._cut:
            raise RoomFailed(f"the next member of the group is lost: {self._cut}")

    def abort(self) -> None:
        """Ends the group. Another thread may be in `broadcast`, which then ends at its deadline at the latest."""
        self._group = None


def _wait(work: Any, deadline: float) -> None:
    """Waits for `work`, a send or receive of gloo, until the monotonic time `deadline` in seconds. May be called only
    once for a work. Raises RuntimeError at the deadline."""
    work.wait(timedelta(seconds=max(deadline - time.monotonic(), LONGEST_S)))  # 0 would mean the group's own timeout


class NcclCollective:
    """A group of processes with one GPU each: NCCL refuses two processes on one GPU. A `buffer` to broadcast must be on
    this process's GPU."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, nccl: Nccl | None = None) -> None:
        self._nccl = nccl or Nccl()
        self._comm = ctypes.c_void_p()
        deadline = time.monotonic() + timeout_s
        if rank == ROOT:
            store.set("nccl", self._nccl.unique_id().hex())
        else:
            store.wait(["nccl"], timedelta(seconds=timeout_s))
        self._stream = torch.cuda.Stream()
        self._nccl.init_rank(self._comm, size, bytes.fromhex(store.get("nccl").decode()), rank)
        self._await(lambda: True, deadline, f"the members of a group of {size} GPUs to connect")

    def on_stream(self) -> AbstractContextManager[object]:
        """Returns a context manager that makes the group's CUDA stream the current stream of this thread. GPU work in
        the `with` block then does not wait for other work of this process."""
        return torch.cuda.stream(self._stream)

    def broadcast(self, buffer: Tensor, timeout_s: float) -> None:
        """Sends the root's `buffer` (uint8) to the other members, which receive it into their own `buffer`. The
        broadcast starts, on the GPU, after the work already queued in the current CUDA stream. Raises RoomFailed after
        `timeout_s` seconds, or if NCCL reports an error. Call `abort` after a RoomFailed."""
        deadline = time.monotonic() + timeout_s
        finished = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream())  # which has filled the buffer
        self._nccl.broadcast(buffer.data_ptr(), buffer.nbytes, ROOT, self._comm, self._stream.cuda_stream)
        self._await(lambda: True, deadline, "a broadcast to begin")
        finished.record(self._stream)
        self._await(finished.query, deadline, f"a broadcast of {buffer.nbytes} bytes")

    def finish(self, timeout_s: float) -> None:
        """Does nothing: NCCL passes all bytes on before `broadcast` returns."""

    def abort(self) -> None:
        """Ends the group. If another thread is in `broadcast`, that call ends too."""
        comm = self._comm
        self._comm = ctypes.c_void_p()
        if comm:
            self._nccl.abort(comm)  # also ends the kernel that waits for the others

    def _await(self, condition: Callable[[], bool], deadline: float, label: str) -> None:
        """Waits until NCCL has no call in progress and `condition()` is true. Raises RoomFailed in three cases: the
        monotonic time `deadline` has passed; NCCL reports an error; `abort` was called. In the first two cases the
        message says that `label` was waited for."""
        started = time.monotonic()
        while True:
            if not self._comm:
                raise RoomFailed("the group was given up")
            error = self._nccl.async_error(self._comm)
            if error not in (Nccl.SUCCESS, Nccl.IN_PROGRESS):
                raise RoomFailed(f"waited for {label}: {self._nccl.describe(error)}")
            if error == Nccl.SUCCESS and condition():
                return
            now = time.monotonic()
            if now > deadline:
                raise RoomFailed(f"waited for {label} until its deadline")
            time.sleep(pause_between_looks(now - started))


class _Config(ctypes.Structure):
    """The first fields of `ncclConfig_t`, which have not changed since NCCL 2.14. The field `version` tells NCCL that
    the struct has only these fields."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Nccl:
    """The functions of NCCL that a group needs, in the form that does not block the caller."""

    SUCCESS = 0
    IN_PROGRESS = 7
    UINT8 = 1
    MAGIC = 0xCAFEBEEF
    VERSION = 21400

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL("libnccl.so.2")
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def unique_id(self) -> bytes:
        identity = _UniqueId()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(identity)))
        return bytes(identity)

    def init_rank(self, comm: ctypes.c_void_p, size: int, unique_id: bytes, rank: int) -> None:
        """Begins to join the group `unique_id` of `size` members as `rank`, and writes NCCL's handle of the group to
        `comm`; `async_error` says when joining has ended."""
        config = _Config(ctypes.sizeof(_Config), self.MAGIC, self.VERSION, 0)
        named = _UniqueId.from_buffer_copy(unique_id)
        self._check(self._library.ncclCommInitRankConfig(ctypes.byref(comm), size, named, rank, ctypes.byref(config)))

    def broadcast(self, address: int, nbytes: int, root: int, comm: ctypes.c_void_p, stream: int) -> None:
        place = ctypes.c_void_p(address)
        count = ctypes.c_size_t(nbytes)
        sent = self._library.ncclBroadcast(place, place, count, self.UINT8, root, comm, ctypes.c_void_p(stream))
        self._check(sent)

    def async_error(self, comm: ctypes.c_void_p) -> int:
        state = ctypes.c_int()
        self._check(self._library.ncclCommGetAsyncError(comm, ctypes.byref(state)))
        return state.value

    def abort(self, comm: ctypes.c_void_p) -> None:
        self._library.ncclCommAbort(comm)

    def describe(self, error: int) -> str:
        return f"NCCL: {self._library.ncclGetErrorString(error).decode()}"

    def _check(self, result: int) -> None:
        if result not in (self.SUCCESS, self.IN_PROGRESS):
            raise RoomFailed(self.describe(result))


Collective = GlooCollective | NcclCollective
"""A group of processes; rank 0 is the root."""


def join_group(kind: str, store: Store, name: str, rank: int, size: int, timeout_s: float, host: str) -> Collective:
    """Joins the group `name` as `rank` of `size`; returns when all members have joined. `kind`: "nccl" or "gloo". The
    members meet at `store`; the root has the address `host`. Raises RoomFailed."""
    group_store = PrefixStore(name, store)
    if kind == "nccl":
        return NcclCollective(group_store, rank, size, timeout_s)
    return GlooCollective(group_store, rank, size, timeout_s, gloo_interface(host))
