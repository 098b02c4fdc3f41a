"""Receivers of broadcasts in processes of their own, and a sender in this one or in another."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from trireme.core.transport import Offer, Session
from trireme.core.weights import Layout, TensorPlace
from trireme.transports.packing import lay_out

HOST = "127.0.0.1"
DEADLINE_S = 120.0
BUCKET_BYTES = 4096
GLOO_THREAD = "pt_gloo_runloop\n"
"""The name that PyTorch gives to the threads of a group, as the system tells it."""

Tensors = Sequence[tuple[str, torch.Tensor]]


def tensors_of(version: int, count: int = 12) -> list[tuple[str, torch.Tensor]]:
    """Makes the tensors of a version, of some 1 to 3 KB each."""
    generator = torch.Generator().manual_seed(version)
    return [(f"t{n}", torch.rand(300 + 40 * n, generator=generator)) for n in range(count)]


def laid_out(tensors: Tensors) -> Layout:
    return lay_out([tensors], BUCKET_BYTES)


def importing_once() -> Any:
    """Returns a context of multiprocessing whose processes are forked from one that has imported all they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["inference.receiving", "trireme.transports.sending"])
    return context


class Receiver:
    """A process with an `inference.receiving.Receiving`, as rank 0 of the engine of replica `number` has one.
    `elsewhere`: it takes itself to be on another device than the sender."""

    def __init__(self, number: int, faults: str = "", *, elsewhere: bool = False) -> None:
        context, self.number = importing_once(), number
        self._end, child = context.Pipe()
        self.process = context.Process(target=_receive, args=(child, number, faults, elsewhere), daemon=True)
        self.process.start()
        child.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def offer(self, offer: Offer) -> None:
        self._end.send(("offer", offer))

    def hear(self) -> Mapping[str, Any]:
        """Returns the next message, without its serial number. Raises EOFError if the process has ended."""
        if not self._end.poll(DEADLINE_S):
            raise TimeoutError(f"receiver {self.number} said nothing for {DEADLINE_S:.0f} s")
        return {name: value for name, value in self._end.recv().items() if name != "serial"}

    def outcome(self) -> str:
        """Returns "arrived", or the reason why not, once it is ready. A dead process has no reason."""
        try:
            while "ready" in (message := self.hear()):
                pass
        except (EOFError, ConnectionResetError):
            return "dead"
        return "arrived" if "arrived" in message else str(message["failed"])

    def digests(self, *, copied: bool = False) -> list[str]:
        """Returns the digests of the buckets that arrived last, and gives their memory back, or has it used again
        (`copied`)."""
        self._end.send(("digests", copied))
        return list(self.hear()["digests"])

    def sums(self, places: Sequence[TensorPlace]) -> Mapping[TensorPlace, str]:
        """Returns the sums of the last version, of those tensors that were summed as they arrived. Those of the next
        one have `places`, if the memory of this one is given back."""
        self._end.send(("sums", places))
        return self.hear()["sums"]

    def file(self) -> int:
        """Returns the inode of the file in which the last version has arrived."""
        self._end.send(("file",))
        return int(self.hear()["file"])

    def resources(self, *, sockets: bool = False) -> Mapping[str, Any]:
        """Returns what the process has open, files without names and perhaps sockets, as soon as it is nothing, or
        after some seconds."""
        deadline = time.monotonic() + 20.0
        while True:
            self._end.send(("held",))
            resources = {name: value for name, value in self.hear().items() if name == "files" or sockets}
            if not any(resources.values()) or time.monotonic() > deadline:
                return resources
            time.sleep(0.05)

    def groups(self) -> Mapping[str, int]:
        """Returns what the process has of groups (`of_groups`)."""
        self._end.send(("groups",))
        return dict(self.hear()["groups"])

    def end(self) -> None:
        if self.process.is_alive():
            os.kill(self.pid, signal.SIGCONT)
            self.process.kill()
        self.process.join(DEADLINE_S)
        self._end.close()


def _receive(end: Any, number: int, faults: str, elsewhere: bool) -> None:
    from inference.mapping import paged
    from inference.receiving import Receiving
    from trireme.core import transport
    from trireme.process.faults import number_process
    from trireme.transports import meeting

    transport.READY_PART = 1  # a busy machine may not connect within a tenth of a test's short deadline
    if elsewhere:
        meeting.device_key = lambda: "another device"
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TRIREME_FAULTS=faults)
    number_process(number)
    read, write = os.pipe()
    arrived: list[str] = []
    offered: list[Offer] = []
    places: Sequence[TensorPlace] = ()

    def relay() -> None:
        for line in os.fdopen(read):
            message = json.loads(line)
            if "arrived" in message:
                arrived.append(message["arrived"])
            end.send(message)

    threading.Thread(target=relay, daemon=True).start()
    receiving = Receiving()
    while True:
        match end.recv():
            case ("offer", offer):
                offered.append(offer)
                receiving.start(offer, number, len(offered), f"/proc/self/fd/{write}")
            case ("file",):
                end.send({"file": os.stat(arrived[-1]).st_ino})
            case ("digests", copied):
                regions, _ = paged(arrived[-1], offered[-1].sizes)
                end.send({"digests": [digest(region.map()) for region in regions]})
                receiving.forget(offered[-1].version, places, copied=copied)
            case ("sums", places):
                end.send({"sums": receiving.sums({arrived[-1]})})
            case ("held",):
                end.send(what_is_held())
            case ("groups",):
                end.send({"groups": of_groups(offered[-1].endpoints_R[0])})


def what_is_held() -> dict[str, Any]:
    process = psutil.Process()
    files = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    ]
    mapped = [m.path for m in process.memory_maps()]
    return {
        "files": sum("memfd:weights" in name for name in [*files, *mapped]),
        "sockets": sum(item.status == psutil.CONN_ESTABLISHED for item in process.net_connections("tcp")),
        "threads": sum(item.name.startswith(("receiving", "broadcast of")) for item in threading.enumerate()),
    }


@dataclass(frozen=True)
class Parts:
    """What a process has of groups: ports of its connections, and ids of its threads."""

    sockets: frozenset[tuple[int, int]] = frozenset()
    threads: frozenset[str] = frozenset()

    @classmethod
    def current(cls) -> Parts:
        connections = [connection for connection in psutil.Process().net_connections("tcp") if connection.raddr]
        threads = set()
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError):  # it has ended meanwhile
                threads |= {task.name} if (task / "comm").read_text() == GLOO_THREAD else set()
        return cls(
            frozenset((connection.laddr.port, connection.raddr.port) for connection in connections), frozenset(threads)
        )


def of_groups(endpoint: tuple[str, int], before: Parts = Parts()) -> dict[str, int]:
    """Returns how many connections, but for those of the store at `endpoint`, and threads of groups this process has
    that it did not have `before`."""
    now = Parts.current()
    return {
        "sockets": sum(endpoint[1] not in ports for ports in now.sockets - before.sockets),
        "threads": len(now.threads - before.threads),
    }


def soon(read: Callable[[], Any], expected: Any) -> Any:
    """Returns what `read` returns, as soon as that is `expected`, or after some seconds."""
    deadline = time.monotonic() + 20.0
    while (now := read()) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return now


def digest(data: Any) -> str:
    return hashlib.sha256(bytes(data)).hexdigest()


@dataclass
class Fleet:
    receivers: list[Receiver]
    endpoints_R: tuple[Any, ...]
    timeout_s: float = DEADLINE_S
    epoch: int = 0
    members: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.members = tuple(receiver.number for receiver in self.receivers)

    def offer(self, version: int, layout: Layout) -> Session:
        """Offers a version to all members; returns their session at once, ready or not."""
        for receiver in self.receivers:
            if receiver.number in self.members:
                receiver.offer(Offer(1, version, layout.sizes, self.endpoints_R, self.timeout_s))
        return Session(1, self.epoch, dict.fromkeys(self.members, 0), self.timeout_s)


@contextmanager
def receivers(count: int, faults: str = "", elsewhere: Sequence[int] = ()) -> Iterator[list[Receiver]]:
    created = [Receiver(number, faults, elsewhere=number in elsewhere) for number in range(count)]
    try:
        yield created
    finally:
        for receiver in created:
            receiver.end()
