"""Receives broadcasts in rank 0 of a replica's engine. A thread does this, so the engine continues to sample.

The bytes of a version come into one file without a name, which all ranks of the engine map. Another thread sums each
received bucket, so that the check of a version need not read it again. The receiving thread writes its progress to a
pipe of the replica's actor, a line of JSON for each message, because the engine itself answers only between two steps.
Waiting for bytes does not hold Python's lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from trireme.core.digest import sums_of
from trireme.core.errors import RoomFailed
from trireme.core.finite_json import to_json
from trireme.core.transport import Offer
from trireme.core.weights import TensorPlace
from trireme.process.faults import fault_point
from trireme.transports.meeting import BroadcastGroup, GroupMember, open_store

PAGE = 4096
LEAST_S = 0.1
PASS_ON_S = 1.0
"""Time to pass on the previous version; its group is reused then."""
LONGEST = 1000
"""Characters of a message: a pipe takes lines of up to 4 KiB whole."""
log = logging.getLogger(__name__)


class Receiving:
    """The newest version that was offered to a replica, on its way into the engine."""

    def __init__(self) -> None:
        self._current: Broadcast | None = None
        self._spare: Landing | None = None  # of a version that was loaded
        self._places: Sequence[TensorPlace] = ()

    def start(self, offer: Offer, number: int, serial: int, pipe: str) -> None:
        """Begins to receive the offer for replica `number`, and stops receiving an older one. Messages carry `serial`
        and go to the pipe at the path `pipe`."""
        last = self._current
        if last:
            last.given_up.set()
        spare = self._spare
        self._spare = None
        self._current = Broadcast(offer, number, serial, pipe, last, spare, self._places)

    def sums(self, paths: Set[str]) -> dict[TensorPlace, str]:
        """Returns the sums of tensors that were summed when they arrived in the files `paths`, by their places. Call it
        in a thread: it waits for sums that are not ready yet."""
        current = self._current
        landing = current.landing if current else None
        if current and landing and paths == {landing.path}:
            return current.sums()
        return {}

    def forget(self, version: int, places: Sequence[TensorPlace], *, copied: bool) -> None:
        """Releases the memory of a loaded version with tensors at these `places`; later versions usually have the same
        places. `copied`: no rank uses it any longer, so the next version is received into it. New memory would cost
        several times as much as receiving, page by page, and an update needs as much anyway."""
        self._places = places
        if self._current and self._current.version == version:
            landing = self._current.landing
            self._current.landing = None
            if copied:
                self._spare = landing


def sums_at(bucket: npt.NDArray[np.uint8], places: Sequence[TensorPlace]) -> dict[TensorPlace, str]:
    """Returns the sums of the tensors at some places of a bucket."""
    return {place: str(sums_of(bucket[place.offset : place.offset + place.nbytes])) for place in places}


class Landing:
    """Memory in a file without a name, which other processes can map by its path as long as this object lives. It stays
    mapped here, because a new mapping of the same pages costs a page fault for each of them."""

    def __init__(self) -> None:
        file = os.memfd_create("weights")
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        self._file = file
        self._whole = np.zeros(0, dtype=np.uint8)
        weakref.finalize(self, os.close, file)

    def memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Returns its memory, which has `nbytes` bytes from now on, at least one."""
        if len(self._whole) != nbytes:
            os.ftruncate(self._file, nbytes)
            self._whole = np.memmap(self.path, np.uint8, "r+", shape=(nbytes,))
        return self._whole


class Broadcast:
    """A version that is being received. The thread continues with the previous version's group."""

    def __init__(
        self,
        offer: Offer,
        number: int,
        serial: int,
        pipe: str,
        before: Broadcast | None,
        landing: Landing | None,
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
        self.landing: Landing | None = landing or Landing()
        """Where the bytes are; None once nothing here needs them."""
        self._places = places
        self._sums: list[Future[dict[TensorPlace, str]]] = []
        name = f"receiving version {offer.version}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def sums(self) -> dict[TensorPlace, str]:
        """Returns the sums of tensors that have arrived, by their places."""
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
        """Keeps the group for the next version, once this one has been passed on by it."""
        try:
            group.collective.finish(self._left_s)
        except RoomFailed as lost:
            log.warning("version %d has arrived, and the group is given up: %s", self.version, lost)
        else:
            self.group = group

    def _last_group(self) -> BroadcastGroup | None:
        """Returns the group by which the version before arrived, if its thread has ended."""
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
        """Receives all buckets and reports where they are; returns the group by which they came."""
        host, port = self._offer.endpoints_R[self._offer.server]
        store = open_store(host, port, timeout_s=self._offer.ready_s)
        fault_point("transport.ready")
        self._tell(pipe, ready=True)
        ends = list(accumulate(-(-size // PAGE) * PAGE for size in self._offer.sizes))
        landing = self.landing
        if landing is None:
            raise RoomFailed("a later version was offered")
        whole = landing.memory(max(ends[-1], 1))
        version = self._offer.version
        attempt = self._offer.attempt
        member = GroupMember(store, host, self._number, attempt, version, self.given_up.is_set)
        # A store whose process is stopped never answers. Then this thread waits until that process ends, and the
        # replica takes the version on demand at the deadline.
        group = member.meet(last, self._deadline)
        offsets = [0, *ends[:-1]]
        summing = ThreadPoolExecutor(1, "sums")
        try:
            for number, (offset, size) in enumerate(zip(offsets, self._offer.sizes, strict=True)):
                fault_point("transport.bucket")
                bucket = whole[offset : offset + size]
                if size:
                    self._receive_bucket(group, torch.from_numpy(bucket))
                self._sums.append(summing.submit(sums_at, bucket, [p for p in self._places if p.bucket == number]))
        finally:
            summing.shutdown(wait=False)
        fault_point("transport.finish")
        self._tell(pipe, arrived={"path": landing.path, "offsets": offsets})
        return group

    def _receive_bucket(self, group: BroadcastGroup, place: torch.Tensor) -> None:
        if self.given_up.is_set():
            raise RoomFailed("a later version was offered")
        if group.kind == "gloo":
            group.collective.broadcast(place, self._left_s)
            return
        arrived = torch.empty_like(place, device="cuda")
        group.collective.broadcast(arrived, self._left_s)
        place.copy_(arrived)

    def _tell(self, pipe: int, **message: object) -> None:
        os.write(pipe, (to_json({"serial": self._serial, **message}) + "\n").encode())
