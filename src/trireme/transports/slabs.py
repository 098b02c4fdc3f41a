"""Sends weights to processes on the same device, through two blocks of memory (slabs) that all of them map.

    1. The sender copies a piece of a bucket into a free slab, and waits until the copy has ended.
    2. It sends the number of the slab and the number of bytes to the receivers, through sockets.
    3. Each receiver copies the piece out of the slab, waits until the copy has ended, and acknowledges the piece.
    4. When all receivers have acknowledged the piece or have ended, the slab is free again.

A receiver on the sender's device (`device_key`) connects to the sender's Unix socket, gets handles of the slabs, and
maps the slabs with them. The connection and the mapping last as long as both processes live, and serve all sessions.
The system closes the sockets of a process that ends. So when a connection ends, its receiver reads no slab any more.

A suspended receiver (SIGSTOP) blocks the slab that it may be reading, until it continues or is killed. Meanwhile the
sender uses the other slab. If both slabs are blocked, `begin` returns no receiver, and the next version is sent by
another transport.

`host_slabs` makes and maps the memory on CPUs, `cuda_slabs` on GPUs. The rest of the code is the same for both.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol, cast

from torch import Tensor

from trireme.core.errors import RoomFailed
from trireme.core.finite_json import to_json
from trireme.process.device import has_gpu, own_gpu
from trireme.process.faults import fault_point

SLABS = 2
SLAB_BYTES = 64 * 2**20
MESSAGE_BYTES = 4096
SENDER = "the trainer shard that sends through shared memory"
TICK_S = 0.05
"""A receiver that waits for a piece looks this often, in seconds, whether the version is still needed."""


class SlabMemory(Protocol):
    """A module that makes memory which other processes of the device can open, and copies to and from it."""

    def make(self, nbytes: int) -> tuple[Tensor, str]:
        """Returns new memory, uint8 [nbytes], and a handle by which other processes open it while this one lives."""

    def open(self, handle: str, nbytes: int) -> Tensor:
        """Returns the memory of another process, uint8 [nbytes], by its `handle`."""

    def close(self, opened: Tensor) -> None:
        """Ends the mapping of memory that `open` returned. Nothing may use the tensor any more."""

    def copy(self, source: Tensor, target: Tensor, timeout_s: float) -> bool:
        """Copies `source` to `target`, both uint8 [n], after the work already queued in the current stream. Returns
        True once the copy has ended, False if it has not ended after `timeout_s` seconds."""

    def on_stream(self) -> AbstractContextManager[object]:
        """Returns a context manager that makes the stream of the copies the current stream. Work in the `with` block
        then does not wait for other work of this process."""


@cache
def slab_memory() -> SlabMemory:
    """Returns the module of slab memory for this process's device."""
    name = "cuda_slabs" if has_gpu() else "host_slabs"
    return cast(SlabMemory, import_module(f"trireme.transports.{name}"))


def device_key() -> str:
    """Returns a text that is equal in two processes exactly if one can open the other's slabs: it names the GPU (if
    there is one), the machine, and the namespaces of its sockets and process ids."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([own_gpu(), machine, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")])


@dataclass(eq=False)
class SharedSlab:
    """One of a sender's slabs."""

    memory: Tensor
    handle: str
    readers: set[socket.socket] = field(default_factory=set)
    """The connections of receivers that have not acknowledged the piece in the slab."""


class SlabSender:
    """The sender's side: the slabs of one process, and its connections to receivers. It makes the slabs when the first
    receiver connects, and never frees them."""

    def __init__(self) -> None:
        self.device = device_key()
        self.address = f"trireme-{token_hex(16)}"
        """The name of its Unix socket, which needs no file."""
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(f"\0{self.address}")
        self._listening.listen()
        self._listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._slabs: list[SharedSlab] = []
        self._numbers: dict[socket.socket, int] = {}  # of the replicas, newest connection last
        self._receivers: list[socket.socket] = []  # of the version that is sent
        self._lock = threading.Lock()  # held by the thread that sends

    def begin(self, members: Collection[int], timeout_s: float) -> tuple[int, ...]:
        """Begins a version for the replicas `members`, which have connected. Returns the replicas that `broadcast` will
        send to. Returns no replica if receivers of earlier versions block all slabs. Raises RoomFailed after
        `timeout_s` seconds."""
        with self._turn(timeout_s):
            self._accept()
            self._hear(0.0)
            connections = {number: link for link, number in self._numbers.items() if number in members}
            if self._slabs and not self._free():
                connections = {}
            self._receivers = list(connections.values())
            return tuple(sorted(connections))

    def broadcast(self, buffer: Tensor, timeout_s: float) -> None:
        """Sends `buffer` (uint8) to the receivers, piece by piece, after the work already queued in the current stream.
        On return `buffer` may be overwritten. Raises RoomFailed if no receiver is left, or after `timeout_s` seconds;
        the error names the replicas."""
        deadline = time.monotonic() + timeout_s
        with self._turn(timeout_s):
            for piece in buffer.split(SLAB_BYTES):
                slab = self._await_slab(deadline)
                if not slab_memory().copy(piece, slab.memory[: len(piece)], deadline - time.monotonic()):
                    raise RoomFailed(
                        f"the device of this trainer shard did not copy {len(piece)} bytes into shared memory before "
                        "the deadline"
                    )
                slab.readers.update(self._receivers)
                for link in list(self._receivers):
                    self._send(link, [self._slabs.index(slab), len(piece)])

    @contextmanager
    def _turn(self, timeout_s: float) -> Iterator[None]:
        """A context manager with a lock: only one thread at a time can be in its `with` block. (A thread that sends an
        earlier version may still be copying after its deadline.) Raises RoomFailed if the lock is not free within
        `timeout_s` seconds."""
        if not self._lock.acquire(timeout=max(timeout_s, 0.0)):
            raise RoomFailed("a thread of this trainer shard was still sending an earlier version at the deadline")
        try:
            yield
        finally:
            self._lock.release()

    def _accept(self) -> None:
        """Accepts the connections of new receivers, reads their numbers, and sends them the handles of the slabs.
        Closes a connection if no number has arrived on it, or if it is from another user. A receiver sends its number
        before it reports its connection in the meeting. So if a receiver has reported, its number has arrived and can
        be read without waiting."""
        while True:
            try:
                link, _ = self._listening.accept()
            except BlockingIOError:
                return
            link.setblocking(False)
            hello = _received(link) if _is_of_this_user(link) else b""
            if not hello:  # it ended at once, or is a stranger
                link.close()
                continue
            while len(self._slabs) < SLABS:
                self._slabs.append(SharedSlab(*slab_memory().make(SLAB_BYTES)))
            self._numbers[link] = int(hello)
            self._selector.register(link, selectors.EVENT_READ)
            self._send(link, [SLAB_BYTES, *(slab.handle for slab in self._slabs)])

    def _free(self) -> SharedSlab | None:
        return next((slab for slab in self._slabs if not slab.readers), None)

    def _await_slab(self, deadline: float) -> SharedSlab:
        """Waits for a free slab until the monotonic time `deadline` and returns it. Raises RoomFailed if all receivers
        have ended, and at the deadline."""
        self._hear(0.0)
        while self._receivers:
            slab = self._free()
            if slab:
                return slab
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                late = sorted({self._numbers[link] for slab in self._slabs for link in slab.readers})
                raise RoomFailed(
                    "a piece of the weights was not copied out of shared memory before the deadline. Late inference "
                    f"replicas: {', '.join(map(str, late))}"
                )
            self._hear(left_s)
        raise RoomFailed("all replicas that receive through shared memory have ended")

    def _hear(self, timeout_s: float) -> None:
        """Reads acknowledgements, for which it waits up to `timeout_s` seconds, and notes which receivers have
        ended."""
        events = self._selector.select(timeout_s)
        while events:
            for key, _ in events:
                link = cast(socket.socket, key.fileobj)
                message = _received(link)
                if message:
                    self._slabs[int(message)].readers.discard(link)
                else:
                    self._lose(link)
            events = self._selector.select(0.0)

    def _send(self, link: socket.socket, message: list[object]) -> None:
        try:
            link.send(to_json(message).encode())
        except OSError:  # it has ended; a queue of a message for each slab is never full
            self._lose(link)

    def _lose(self, link: socket.socket) -> None:
        """Forgets a receiver that has ended: it reads no slab any more."""
        del self._numbers[link]
        for slab in self._slabs:
            slab.readers.discard(link)
        self._receivers = [receiver for receiver in self._receivers if receiver is not link]
        self._selector.unregister(link)
        link.close()


class SlabReceiver:
    """The receiver's side: the connection of replica `number` to the sender at `address`, as a
    `trireme.transports.collective.Collective`. Raises OSError if no process of this user listens there."""

    def __init__(self, address: str, number: int) -> None:
        self.address = address
        self.given_up: Callable[[], bool] = lambda: False
        """Returns True when the version that is received is no longer needed."""
        self._slabs: list[Tensor] = []
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._link.connect(f"\0{address}")
            if not _is_of_this_user(self._link):
                raise PermissionError(f"the Unix socket {address} is another user's")
            self._link.send(str(number).encode())
        except OSError:
            self._link.close()
            raise
        self._link.settimeout(TICK_S)

    def broadcast(self, buffer: Tensor, timeout_s: float) -> None:
        """Fills `buffer` with the bytes that the sender broadcasts. `buffer` is uint8, and has the size of the sender's
        buffer. Raises RoomFailed if the sender has ended, if `given_up` returns True, or after `timeout_s` seconds.
        Call `abort` after a RoomFailed."""
        deadline = time.monotonic() + timeout_s
        at = 0
        while at < len(buffer):
            if not self._slabs:
                self._open(deadline)
            number, nbytes = self._next(deadline)
            piece = buffer[at : at + nbytes]
            if len(piece) < nbytes:
                raise RoomFailed(
                    f"{SENDER} sent a piece of {nbytes} bytes; expected at most {len(piece)} bytes, which is the rest "
                    "of the buffer"
                )
            fault_point("transport.slab")
            with slab_memory().on_stream():  # this thread's own is the engine's, whose steps would come first
                copied = slab_memory().copy(self._slabs[number][:nbytes], piece, deadline - time.monotonic())
            if not copied:
                raise RoomFailed(
                    f"the device of this replica did not copy {nbytes} bytes out of shared memory before the deadline"
                )
            self._acknowledge(number)
            at += nbytes

    def finish(self, timeout_s: float) -> None:
        """Does nothing: this receiver passes nothing on."""

    def abort(self) -> None:
        """Ends the connection. After that, the sender may overwrite the slabs. So only the thread that reads the slabs
        may call this."""
        self._link.close()

    def _open(self, deadline: float) -> None:
        nbytes, *handles = self._next(deadline)
        try:
            self._slabs = opened_slabs(self.address, handles, nbytes)
        except OSError as error:
            raise RoomFailed(f"{SENDER} has ended: {error}") from error

    def _next(self, deadline: float) -> list[Any]:
        """Waits for the sender's next message and returns it."""
        while time.monotonic() < deadline:
            if self.given_up():
                raise RoomFailed("a later version was offered")
            try:
                message = self._link.recv(MESSAGE_BYTES)
            except TimeoutError:
                continue
            except OSError:
                message = b""
            if not message:
                raise RoomFailed(f"{SENDER} has ended")
            return list(json.loads(message))
        raise RoomFailed(f"the next piece of the weights did not come from {SENDER} before the deadline")

    def _acknowledge(self, number: int) -> None:
        try:
            self._link.send(str(number).encode())
        except OSError as error:
            raise RoomFailed(f"{SENDER} has ended") from error


_opening = threading.Lock()
_opened: dict[str, list[Tensor]] = {}  # the slabs of the newest sender, by its address


def opened_slabs(address: str, handles: list[str], nbytes: int) -> list[Tensor]:
    """Returns the slabs of the sender at `address`, each of `nbytes` bytes. If they are not open yet, closes the slabs
    of the earlier sender, which has ended or no longer sends to this process, and then opens them."""
    with _opening:
        if address not in _opened:
            for slab in chain(*_opened.values()):
                slab_memory().close(slab)
            _opened.clear()
            _opened[address] = [slab_memory().open(handle, nbytes) for handle in handles]
        return _opened[address]


def _is_of_this_user(link: socket.socket) -> bool:
    """Returns True if the process at the other end of a connection has this process's user."""
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


def _received(link: socket.socket) -> bytes:
    """Returns the next message of a non-blocking connection; b"" if no message has arrived, or if the connection has
    ended."""
    try:
        return link.recv(MESSAGE_BYTES)
    except OSError:
        return b""
