"""Receives broadcasts in rank 0 of a replica's engine. A thread does this, so the engine continues to sample.

The bytes of a version come into one file without a name, which all ranks of the engine map. Another thread sums each
received bucket, so that the check of a version need not read it again. The receiving thread writes its progress to a
pipe of the replica's actor, a line of JSON for each message, because the engine itself answers only between two steps.
Waiting for bytes does not hold Python's lock.

If the plan has room for it, each rank on a GPU has a second buffer there, for a whole version (`DeviceLanding`), which
is filled while requests run (not run on a GPU yet). If the engine has one rank, bytes that come over NCCL, or through
memory of the same GPU (`trireme.transports.slabs`), arrive in this buffer. All other bytes arrive in host memory, and
each rank copies them to its buffer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from inference.mapping import ON_DEVICE, Landing, Region, paged, with_table
from trireme.core.digest import sums_of
from trireme.core.errors import RoomFailed
from trireme.core.finite_json import to_json
from trireme.core.transport import Offer
from trireme.core.weights import TensorPlace
from trireme.process.faults import fault_point
from trireme.transports.collective import GlooCollective, NcclCollective
from trireme.transports.meeting import BroadcastGroup, GroupMember, open_store
from trireme.transports.slabs import SlabReceiver, slab_memory

LEAST_S = 0.1
PASS_ON_S = 1.0
"""Seconds that the next version waits for the previous version's group, while that still passes bytes on to other
replicas. After that the group is not used again."""
LONGEST = 1000
"""Most characters of an error message: a pipe takes lines of up to 4 KiB whole."""
log = logging.getLogger(__name__)


class DeviceLanding:
    """Memory on `device` for the received bytes of a whole version."""

    path = ON_DEVICE

    def __init__(self, device: str) -> None:
        self._device = device
        self.whole = torch.empty(0, dtype=torch.uint8)
        """All bytes."""

    def bytes_at(self, region: Region) -> torch.Tensor:
        """Returns the bytes at `region`, uint8, without a copy."""
        return self.whole[region.offset : region.offset + region.nbytes]

    def regions(self, sizes: Sequence[int]) -> list[Region]:
        """Returns for each bucket a region of this memory with the number of bytes in `sizes`. Makes the memory anew if
        its size differs."""
        regions, end = paged(ON_DEVICE, sizes)
        if len(self.whole) != end:
            self.whole = torch.empty(0, dtype=torch.uint8)  # two would not fit
            with slab_memory().on_stream():  # memory that the engine's stream has freed may still be in use there
                self.whole = torch.empty(end, dtype=torch.uint8, device=self._device)
        return regions


class Receiving:
    """The memory of one rank of an engine for arriving versions. In rank 0, also receives the newest version that was
    offered to the replica. `device`: the rank's GPU, if a version has room there in addition to the loaded one; else
    None. `alone`: the engine has one rank, so that no other rank has to map the bytes that arrive."""

    def __init__(self, device: str | None = None, *, alone: bool = True) -> None:
        self._device = device
        self._alone = alone
        self._current: Broadcast | None = None
        self._copy: DeviceLanding | None = None  # of a version that lies in host memory too
        self._spare: Landing | None = None  # of a version that was loaded
        self._spare_on_device: DeviceLanding | None = None
        self._places: Sequence[TensorPlace] = ()

    def start(self, offer: Offer, number: int, serial: int, pipe: str) -> None:
        """Begins to receive the version of `offer`, in a thread, for replica `number`. Gives up an older version that
        has not arrived. The thread's messages carry `serial` and go to the pipe at the path `pipe`."""
        last = self._current
        if last:
            last.given_up.set()
        self._current = Broadcast(offer, number, serial, pipe, last, self._memory_for, self._places)

    def _memory_for(self, group: BroadcastGroup) -> Landing | DeviceLanding:
        """Returns memory for a version that arrives by `group`. It is on the device if the bytes can stay there."""
        reaches = isinstance(group.collective, (SlabReceiver, NcclCollective))
        if self._device is not None and reaches and self._alone and self._copy is None:
            return self._on_device(self._device)
        spare = self._spare or Landing()
        self._spare = None
        return spare

    def _on_device(self, device: str) -> DeviceLanding:
        spare = self._spare_on_device or DeviceLanding(device)
        self._spare_on_device = None
        return spare

    def copies(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Returns memory on the device, to which the caller copies a version that lies in host memory: a tensor of
        bytes for each bucket, with the number of bytes in `sizes`. Returns [] if the plan has no room for it, or if
        a version has arrived or is arriving there."""
        arriving = self._current.landing if self._current else None
        if self._device is None or isinstance(arriving, DeviceLanding):
            return []
        self._copy = copy = self._copy or self._on_device(self._device)
        return [copy.bytes_at(region) for region in copy.regions(sizes)]

    def on_device(self, region: Region) -> torch.Tensor:
        """Returns the bytes of the newest version at `region`, which is on the device."""
        landing = self._current.landing if self._current else None
        assert isinstance(landing, DeviceLanding), "the actor begins no other version before this is called"
        return landing.bytes_at(region)

    def sums(self, paths: Set[str]) -> dict[TensorPlace, str]:
        """Returns {place: sums} of the tensors that were summed as they arrived. `paths`: the files that hold the
        version to be checked. If they are not exactly the one file of the newest broadcast, returns {}, because the
        sums are of the bytes in that file. Waits for sums that are not ready: call it in a thread."""
        current = self._current
        landing = current.landing if current else None
        if current and landing and paths == {landing.path}:
            return current.sums()
        return {}

    def forget(self, version: int, places: Sequence[TensorPlace], *, copied: bool) -> None:
        """Releases the memory of `version`, which the engine has loaded. `places`: where the version's tensors were;
        the next version is expected to have the same places. `copied`: no rank uses the memory any more, so the next
        version is received into it. New memory would take several times as long as the receiving, because the system
        provides it page by page."""
        self._places = places
        landings: list[Landing | DeviceLanding | None] = [self._copy]
        self._copy = None
        if self._current and self._current.version == version:
            landings.append(self._current.landing)
            self._current.landing = None
        for landing in landings if copied else []:
            if isinstance(landing, DeviceLanding):
                self._spare_on_device = landing
            elif landing:
                self._spare = landing


def sums_at(bucket: npt.NDArray[np.uint8], places: Sequence[TensorPlace]) -> dict[TensorPlace, str]:
    """Returns {place: sums} of the tensors at `places` of a bucket."""
    return {place: str(sums_of(bucket[place.offset : place.offset + place.nbytes])) for place in places}


class Broadcast:
    """Receives the version of `offer` in a thread of its own, for replica `number`. If possible, reuses the
    communication group of `before`, which is the broadcast of the previous version. The thread's messages carry
    `serial` and go to the pipe at the path `pipe`. `memory_for` returns the memory to receive into, for the group by
    which the version comes. `places`: the tensors that are summed as they arrive in host memory."""

    def __init__(
        self,
        offer: Offer,
        number: int,
        serial: int,
        pipe: str,
        before: Broadcast | None,
        memory_for: Callable[[BroadcastGroup], Landing | DeviceLanding],
        places: Sequence[TensorPlace],
    ) -> None:
        self.version = offer.version
        self._offer = offer
        self._number = number
        self._serial = serial
        self._pipe = pipe
        self._before = before
        self._deadline = time.monotonic() + offer.timeout_s
        self.given_up = threading.Event()
        self.group: BroadcastGroup | None = None
        self._memory_for = memory_for
        self.landing: Landing | DeviceLanding | None = None
        """The memory with the received bytes; None before they arrive, and once nothing here needs it."""
        self._places = places
        self._sums: list[Future[dict[TensorPlace, str]]] = []
        name = f"receiving version {offer.version}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def sums(self) -> dict[TensorPlace, str]:
        """Returns {place: sums} of the tensors that have arrived; waits for sums in progress."""
        return {place: digest for sums in self._sums for place, digest in sums.result().items()}

    def _run(self) -> None:
        pipe = os.open(self._pipe, os.O_WRONLY)
        try:
            group = self._receive(self._last_group(), pipe)
        except Exception as error:  # what the libraries raise has no narrower type
            self.landing = None
            self._tell(pipe, failed=str(error)[:LONGEST])
        else:
            self._finish(group)
        finally:
            os.close(pipe)

    def _finish(self, group: BroadcastGroup) -> None:
        """Waits until `group` has passed this version on to other replicas, and then retains `group` for the next
        version."""
        try:
            group.collective.finish(self._left_s)
        except RoomFailed as lost:
            log.warning("version %d has arrived, and the group is given up: %s", self.version, lost)
        else:
            self.group = group

    def _last_group(self) -> BroadcastGroup | None:
        """Returns the group by which the previous version arrived, so that it can be used again. Returns None if there
        was no previous version, if receiving it failed or its group was given up, or if its thread does not end within
        PASS_ON_S seconds."""
        before = self._before
        self._before = None
        if before is None:
            return None
        before.landing = None
        before._thread.join(PASS_ON_S)
        if before._thread.is_alive():
            return None
        return before.group

    @property
    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), LEAST_S)

    def _receive(self, last: BroadcastGroup | None, pipe: int) -> BroadcastGroup:
        """Receives all buckets, and writes to `pipe` that this rank is ready and then where the bytes are. Returns
        the group by which they came: `last`, or a new one."""
        host, port = self._offer.endpoints_R[self._offer.server]
        store = open_store(host, port, timeout_s=self._offer.ready_s)
        fault_point("transport.ready")
        self._tell(pipe, ready=True)
        member = GroupMember(store, host, self._number, self._offer.attempt, self._offer.version, self.given_up.is_set)
        # A store whose process is stopped never answers. Then this thread waits until that process ends, and the
        # replica takes the version on demand at the deadline.
        group = member.meet(last, self._deadline)
        summing = ThreadPoolExecutor(1, "sums")
        try:
            self.landing = landing = self._memory_for(group)
            if group.changes:
                assert isinstance(landing, Landing), "changes come by gloo"
                self._receive_changes(group, landing)
            else:
                self._receive_whole(group, landing, summing)
        except Exception:
            if isinstance(group.collective, SlabReceiver):
                group.collective.abort()  # so that the sender need not wait for it
            raise
        finally:
            summing.shutdown(wait=False)
        fault_point("transport.finish")
        self._tell(pipe, arrived=landing.path, changes=group.changes)
        return group

    def _receive_whole(self, group: BroadcastGroup, landing: Landing | DeviceLanding, summing: Executor) -> None:
        """Receives all buckets into `landing`. Buckets in host memory are summed in `summing`."""
        for number, region in enumerate(landing.regions(self._offer.sizes)):
            fault_point("transport.bucket")
            bucket = landing.bytes_at(region)
            if region.nbytes:
                self._receive_bucket(group, torch.as_tensor(bucket))
            if isinstance(bucket, np.ndarray):
                places = [place for place in self._places if place.bucket == number]
                self._sums.append(summing.submit(sums_at, bucket, places))

    def _receive_changes(self, group: BroadcastGroup, landing: Landing) -> None:
        """Receives the changes of each bucket, or the whole bucket, to the place of the bucket in `landing`. Behind the
        buckets, writes the number of bytes that arrived for each of them (`arrived_regions`)."""
        *regions, table = landing.regions(with_table(self._offer.sizes))
        counts = torch.zeros(len(regions), dtype=torch.int64)
        for number, region in enumerate(regions):
            fault_point("transport.bucket")
            if not region.nbytes:
                continue
            self._receive_bucket(group, counts[number : number + 1].view(torch.uint8))
            count = int(counts[number])
            if not 0 <= count <= region.nbytes:
                raise RoomFailed(f"the trainer announced {count} bytes for a bucket of {region.nbytes} bytes")
            if count:
                self._receive_bucket(group, torch.as_tensor(landing.bytes_at(region)[:count]))
        landing.bytes_at(table)[:] = counts.numpy().view(np.uint8)

    def _receive_bucket(self, group: BroadcastGroup, place: torch.Tensor) -> None:
        if self.given_up.is_set():
            raise RoomFailed("a later version was offered")
        collective = group.collective
        if isinstance(collective, (GlooCollective, SlabReceiver)):
            collective.broadcast(place, self._left_s)
            return
        with collective.on_stream():  # on this thread's own the engine computes, and its steps would come first
            arrived = place if place.device.type == "cuda" else torch.empty_like(place, device="cuda")
            collective.broadcast(arrived, self._left_s)
            if arrived is not place:
                place.copy_(arrived)

    def _tell(self, pipe: int, **message: object) -> None:
        os.write(pipe, (to_json({"serial": self._serial, **message}) + "\n").encode())
