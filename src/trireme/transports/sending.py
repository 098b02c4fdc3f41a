"""Sends broadcasts from a trainer rank.

The rank never waits for a replica beyond the deadline of the session. A thread sends. At the deadline the rank abandons
the thread, the thread's group and the buffers that the thread may still read. It continues to gather weights, because
that takes all ranks. The members fetch the missing buckets.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trireme.core.errors import RoomFailed
from trireme.core.transport import TRIALS, Endpoint, Session
from trireme.core.weights import Layout
from trireme.process.device import has_gpu
from trireme.process.interfaces import listen
from trireme.transports.broadcast import KeptPart
from trireme.transports.delta import ChangesEncoder, warm_up
from trireme.transports.kept_versions import Bucket, KeptVersions
from trireme.transports.meeting import BroadcastGroup, GroupRoot, named, open_store
from trireme.transports.packing import BUFFERS, fill
from trireme.transports.slabs import SlabSender

Buffer: TypeAlias = "Bucket | Tensor"
"""A flat array of bytes in host memory, or a tensor of them on a GPU."""
Way: TypeAlias = BroadcastGroup | SlabSender
TICK_S = 0.02
ENDING_S = 5.0
"""If a thread sends only through slabs, it ends at most this many seconds after its deadline."""
log = logging.getLogger(__name__)


class Sending:
    """Sends one version to the replicas `members`, in a thread. `slabs`: memory for replicas on this rank's device.
    `group`: the group that sent the previous version; it is used again if its members stay the same. `before`: this
    rank's side of the meeting for the previous version; the messages of that meeting are removed. `encoder`: encodes
    changes, which are sent instead of whole buckets; None: whole buckets are sent.

    A version goes to some replicas through slabs and to others by a group. If one of these ways fails, the other
    continues. The thread owns the group. The thread ends at the deadline at the latest, also after a failure, and the
    group's sockets end with it.
    """

    def __init__(
        self,
        endpoint: tuple[str, int],
        version: int,
        session: Session,
        members: tuple[int, ...],
        slabs: SlabSender | None,
        group: BroadcastGroup | None,
        before: GroupRoot | None,
        encoder: ChangesEncoder | None,
    ) -> None:
        self.encoder = encoder
        self.group: BroadcastGroup | None = group
        self.root: GroupRoot | None = None
        self.sharing: tuple[int, ...] = ()
        """Members that receive through slabs."""
        self.failure = ""
        """Why sending was abandoned; "" while it was not."""
        self.lost_ways: list[str] = []
        """Why a way failed, while another continued."""
        self.late: tuple[int, ...] = ()
        """Members that did not connect in time, and were left out."""
        self.deadline = time.monotonic() + session.left_s
        self._slabs = slabs
        self._before = before
        self._open_root = lambda: GroupRoot(
            open_store(*endpoint), endpoint[0], version, session, members, slabs, changes=encoder is not None
        )
        self._finished = threading.Event()
        self._full: queue.Queue[tuple[Buffer, Callable[[], None]] | None] = queue.Queue(BUFFERS)
        threading.Thread(target=self._run, name=f"broadcast of version {version}", daemon=True).start()

    def hand_over(self, bucket: Buffer, sent: Callable[[], None]) -> bool:
        """Hands a full bucket to the thread, which calls `sent` when it no longer reads the bucket. Returns False if
        sending was abandoned; then `sent` may never be called."""
        return self.wait(lambda: self._accepts((bucket, sent)))

    def finish(self) -> bool:
        """Waits until the thread has sent all buckets. Returns False if sending was abandoned."""
        return self.wait(lambda: self._accepts(None)) and self.wait(lambda: self._finished.wait(TICK_S))

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Calls `condition` again and again until it returns True; each call may take TICK_S seconds. Returns False if
        sending was abandoned. At the deadline, abandons it."""
        while not self.failure:
            if condition():
                return not self.failure
            # A thread that sends only through slabs ends by itself at the deadline. Its error names the late replicas,
            # and the extra time lets this error become `failure`.
            ending_s = ENDING_S if self.sharing and not self.group else 0.0
            if time.monotonic() > self.deadline + ending_s:
                self._give_up("its deadline has passed")
        return False

    def _accepts(self, item: tuple[Buffer, Callable[[], None]] | None) -> bool:
        try:
            self._full.put(item, timeout=TICK_S)
        except queue.Full:
            return False
        return True

    def _give_up(self, reason: str) -> None:
        self.failure = self.failure or reason
        group = self.group
        if group:
            group.collective.abort()

    def _run(self) -> None:
        try:
            self._send_all()
        except Exception as error:  # what the libraries raise has no narrower type
            self._give_up(str(error))
            self.group = None
        self._finished.set()

    def _send_all(self) -> None:
        if self._before:
            self._before.clear()
        self.root = self._open_root()
        receivers = self.root.meet(self.group, self.deadline)
        self.group = receivers.group
        self.sharing = receivers.sharing
        self.late = receivers.late
        ways: list[Way] = [self.group] if self.group else []
        if self._slabs and self.sharing:
            ways.append(self._slabs)
        for number in itertools.count():
            item = self._next()
            if item is None:
                return
            bucket, sent = item
            if isinstance(bucket, Tensor):
                buffer = bucket
            else:
                buffer = torch.from_numpy(bucket)
            if self.encoder and len(buffer):
                parts = _encoded(self.encoder, number, buffer)
            else:
                parts = [buffer]
            for part in parts:
                for way in list(ways) if len(part) else []:
                    self._send(way, part, ways)
            sent()

    def _send(self, way: Way, buffer: Tensor, ways: list[Way]) -> None:
        """Sends a bucket by one of `ways`. If that fails, removes the way; if it was the last one, raises
        RoomFailed."""
        timeout_s = max(self.deadline - time.monotonic(), TICK_S)
        try:
            if isinstance(way, SlabSender):
                way.broadcast(buffer, timeout_s / len(ways))  # the group has the rest
            elif way.kind == "gloo":  # from a GPU through host memory
                way.collective.broadcast(buffer.cpu(), timeout_s)
            else:
                way.collective.broadcast(buffer, timeout_s)
        except RoomFailed as error:
            ways.remove(way)
            if not ways or self.failure:
                raise
            self.lost_ways.append(str(error))
            if isinstance(way, BroadcastGroup):
                way.collective.abort()
                self.group = None

    def _next(self) -> tuple[Buffer, Callable[[], None]] | None:
        while not self.failure and time.monotonic() < self.deadline:
            try:
                return self._full.get(timeout=TICK_S)
            except queue.Empty:
                continue
        raise RoomFailed(self.failure or "the trainer did not gather all weights before the deadline")


def _encoded(encoder: ChangesEncoder, number: int, buffer: Tensor) -> list[Tensor]:
    """Returns what is sent for bucket `number` with the bytes `buffer`: the number of bytes that follow, as an int64,
    and then the changes, or the whole bucket if its changes are not worth it."""
    bucket = buffer.cpu().numpy()
    changes = encoder.encode(number, bucket)
    if changes is None:
        body = bucket
    else:
        body = changes
    return [torch.tensor([len(body)]).view(torch.uint8), torch.from_numpy(body)]


class Packing:
    """The buckets of one version in a rank: which buckets the rank fills, in which memory, and where they go.

    The rank keeps the buckets of its share (bucket b is in the share of rank b mod R) in host memory. With a GPU all
    buckets are packed on the GPU, and the share is copied to the host while the buckets are sent. Without a GPU, a
    bucket of the share is packed in the memory where it is kept. All other buckets are packed in `free` buffers, which
    are used again.
    """

    def __init__(
        self,
        layout: Layout,
        share: Iterable[int],
        sending: Sending | None,
        on_gpu: bool,
        free: queue.SimpleQueue[Buffer] | None,
    ) -> None:
        self._sizes = layout.sizes
        self._sending = sending
        self._share = set(share)
        if sending:
            self.selected = set(range(len(layout.sizes)))
        else:
            self.selected = set(self._share)
        """The buckets to fill: the share alone once the sending has been given up."""
        self.buckets: dict[int, Bucket] = {number: np.zeros(0, dtype=np.uint8) for number in self._share}
        self._copies = torch.cuda.Stream() if on_gpu else None
        self._borrowed: dict[int, Buffer] = {}
        self.free = free or self._make_buffers()

    def buffer(self, number: int) -> Buffer:
        """Returns memory for bucket `number`. If all buffers are in use, waits until one has been sent."""
        if number in self._share and self._copies is None:
            return np.zeros(self._sizes[number], dtype=np.uint8)
        taken: list[Buffer] = []
        if self._sending is None or not self._sending.wait(lambda: self._take_free(taken)):
            self._without_sending()
            taken = [self.free.get_nowait()]
        self._borrowed[number] = taken[0]
        return taken[0]

    def finish(self, number: int, bucket: Buffer) -> None:
        """Takes the full bucket `number`: hands it to the sending thread, and stores it in `buckets` if it belongs to
        the rank's share."""
        borrowed = self._borrowed.pop(number, None)
        free = self.free

        def sent() -> None:
            if borrowed is not None:
                free.put(borrowed)

        if number in self._share and self._copies is None:
            assert isinstance(bucket, np.ndarray)
            self.buckets[number] = bucket
        handed = self._sending is not None and self._sending.hand_over(bucket, sent)
        if number in self._share and self._copies is not None:
            assert isinstance(bucket, Tensor)
            self.buckets[number] = self._copy(bucket)
        if not handed:
            self._without_sending()
            if self._sending is None:
                sent()

    def _copy(self, bucket: Tensor) -> Bucket:
        """Returns a copy of a bucket in pinned host memory. The copy runs in a CUDA stream of its own, and the GPU
        computes meanwhile."""
        assert self._copies is not None
        copy = torch.empty(bucket.shape, dtype=torch.uint8, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream())  # which has filled the bucket
        with torch.cuda.stream(self._copies):
            copy.copy_(bucket, non_blocking=True)
        self._copies.synchronize()
        return copy.numpy()

    def _take_free(self, taken: list[Buffer]) -> bool:
        try:
            taken.append(self.free.get(timeout=TICK_S))
        except queue.Empty:
            return False
        return True

    def _without_sending(self) -> None:
        """Continues after the sending thread was abandoned: fills only the rank's share from then on, in new buffers,
        because the thread may still read the old ones."""
        if self._sending is not None:
            self._sending, self.free = None, self._make_buffers()
            self.selected &= self._share

    def _make_buffers(self) -> queue.SimpleQueue[Buffer]:
        free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            if self._copies is None:
                free.put(np.zeros(max(self._sizes), dtype=np.uint8))  # memory that is never written to costs nothing
            else:
                free.put(torch.zeros(max(self._sizes), dtype=torch.uint8, device="cuda"))
        return free


class BroadcastSender:
    """Implements `trireme.core.transport.Sender` for rank `rank` of `size`. `host`: the address of this rank's node in
    the cluster. `holder`: the actor that serves kept buckets. `ports`: where the sender may listen; empty: any.
    `delta`: changes are sent where the last version was sent too, by gloo. `shares_device`: replicas on this rank's
    device receive through slabs."""

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        holder: Any,
        ports: Sequence[int] = (),
        *,
        delta: bool = False,
        shares_device: bool = False,
    ) -> None:
        self._delta = delta
        if delta:
            warm_up()
        self._encoder: ChangesEncoder | None = None
        """Has the version before, if this rank has sent all of it."""
        self._rank = rank
        self._size = size
        self._on_gpu = has_gpu()
        self._trials = TRIALS if self._on_gpu else 0
        listening = listen(host, ports)
        self._store = open_store(host, listening.getsockname()[1], listening.detach())
        self._address = host, self._store.port
        self.endpoint: Endpoint | None = self._address
        """Address and port at which replicas connect to this sender; None once a trial has failed. It has no Ray handle
        in it, because engines get it, which know nothing of Ray."""
        self._holder = holder
        self.versions = KeptVersions()
        self._slabs = SlabSender() if shares_device else None
        self._group: BroadcastGroup | None = None
        self._last: Sending | None = None
        self._free: queue.SimpleQueue[Buffer] | None = None

    def send(
        self, version: int, layout: Layout, units: Iterable[Sequence[tuple[str, Tensor]]], session: Session | None
    ) -> KeptPart:
        members = session.served_by(self._rank) if session else ()
        sending = None
        if session and members:
            before = self._last.root if self._last else None
            sharing_before = self._last.sharing if self._last else ()
            if self._delta:
                encoder = self._encoder or ChangesEncoder()
            else:
                encoder = None
            group = self._group
            self._last = sending = Sending(
                self._address, version, session, members, self._slabs, group, before, encoder
            )
            self._group = None
        self._encoder = None
        self.versions.begin(version)
        share = range(self._rank, len(layout.sizes), self._size)
        packing = Packing(layout, share, sending, self._on_gpu, self._free)
        fill(layout, units, packing.selected, packing.buffer, packing.finish)
        for number, bucket in packing.buckets.items():
            self.versions.keep(version, number, bucket)
        failures = []
        if sending and not sending.finish():
            failures.append(f"was not sent to all of {named(members)}: {sending.failure}")
        if sending and sending.late:
            failures.append(f"{named(sending.late)} did not connect though ready")
        if sending and sending.lost_ways:
            failures.append(f"was not sent to some of {named(members)}: {'; '.join(sending.lost_ways)}")
        if sending and sending.sharing != sharing_before:
            names = named(sending.sharing) if sending.sharing else "nobody"
            log.info("weights travel through memory of this process to %s", names)
        if sending and self._trials:
            self._trials -= 1
            if (sending.failure or sending.lost_ways) and not sending.sharing:
                self.endpoint = None
                failures.append("as this was a trial, no further version is sent")
        if failures:
            log.warning("version %d: %s; who lacks bytes takes them on demand", version, "; ".join(failures))
        self._free = packing.free
        if sending and sending.failure:
            self._free = None
        elif sending:
            self._group = sending.group
            self._encoder = sending.encoder
        return KeptPart(version, len(layout.sizes), self._holder)
