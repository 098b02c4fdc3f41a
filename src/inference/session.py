"""A replica's part in broadcasts of weights: its answer to an offer, and the received bytes.

The engine's rank 0 receives (`inference.receiving`) and writes its progress to a pipe of this process. A session here
is a `trireme.core.transport.Session`: the replicas that one version is sent to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from inference.mapping import ON_DEVICE, Landing, Region, arrived_regions, paged, regions_of
from trireme.core.errors import RoomFailed
from trireme.core.transport import Offer, Transport
from trireme.core.types import WeightIdentity
from trireme.core.weights import Layout, PublishedWeights

Value = TypeVar("Value")
GRACE_S = 1.0
"""Seconds by which a replica waits longer than the trainer: its offer came a little later."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BucketStep:
    """Says what rank 0 of an engine writes to one bucket of the memory `Broadcasts.landing`."""

    region: Region
    """Where other processes map what arrived."""
    changes: bool
    """True: changes arrived, which apply to the bytes that the bucket has. False: the whole bucket arrived."""


@dataclass(frozen=True)
class Arrived:
    """The bytes of a version in this node's memory, or on the engine's device. They stay there as long as this object
    lives."""

    regions: list[Region]
    """Where other processes map the buckets."""
    buckets: Sequence[npt.NDArray[np.uint8]]
    """The bytes that arrived, as arrays of this process; bytes on the device are left out. Without `steps` they are the
    bytes at `regions`; with `steps` they are written there."""
    steps: tuple[BucketStep, ...] = ()
    """What the engine's rank 0 writes to each of `regions`; (): nothing, as the bytes are there already."""

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in [step.region for step in self.steps] or self.regions)

    @property
    def has_changes(self) -> bool:
        return any(step.changes for step in self.steps)


@dataclass
class _Incoming:
    """A version that was offered to this replica. The future `ready` has a result once the engine is ready to receive,
    `arrived` once all bytes have arrived."""

    offer: Offer
    serial: int
    deadline: float
    ready: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    arrived: asyncio.Future[list[Region]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def hear(self, message: dict[str, Any]) -> None:
        """Settles the futures by a message from the receiving thread, with one of three keys: "ready" (the thread is
        ready to receive), "arrived" (the path of the buckets; "changes" says if they may have changes instead) or
        "failed" (the reason)."""
        if "arrived" in message:
            if message["changes"]:
                regions = arrived_regions(message["arrived"], self.offer.sizes)
            else:
                regions, _ = paged(message["arrived"], self.offer.sizes)
            self._settle(self.arrived, regions)
        elif "failed" in message:
            self.fail(message["failed"])
        self._settle(self.ready, None)

    def fail(self, reason: str) -> None:
        for future in (self.ready, self.arrived):
            if not future.done():
                future.set_exception(RoomFailed(reason))
                future.exception()  # nobody may ever ask for it

    def is_of(self, identity: WeightIdentity) -> bool:
        """Returns True if the offered version is the version of the weights `identity`."""
        return (self.offer.attempt, self.offer.version) == (identity.attempt, identity.version)

    @staticmethod
    def _settle(future: asyncio.Future[Value], value: Value) -> None:
        if not future.done():
            future.set_result(value)


class Broadcasts:
    """This replica's side of broadcasts: answers offers, and provides the bytes of versions. `transport` fetches
    versions on demand. `delta`: changes travel, so `landing` holds the newest version. `start(offer, serial, pipe)`
    makes the engine's rank 0 receive an offered version and write messages to the pipe at the path `pipe`, with the
    number `serial` in each."""

    def __init__(
        self, transport: Transport, start: Callable[[Offer, int, str], Awaitable[object]], *, delta: bool = False
    ) -> None:
        self._delta = delta
        self._transport = transport
        self._start = start
        self._incoming: _Incoming | None = None
        self._pipe: tuple[int, int] | None = None
        self._unread = b""
        self._copies = False  # what is fetched must be copied for the engine
        self._serial = 0
        self._mapping = asyncio.Lock()  # held while what has arrived is mapped, and while receiving begins
        self.base: WeightIdentity | None = None
        """The version that `landing` holds, to which changes can apply; None: not known."""

    @cached_property
    def landing(self) -> Landing:
        """Memory that holds a whole version; a delta that is applied to it makes the next version. The engine's rank 0
        writes to this memory, and all ranks map it."""
        return Landing()

    async def offer(self, offer: Offer) -> None:
        """Makes the engine begin to receive the version of `offer`, and gives up an older version that has not arrived.
        Returns when the engine is ready. Raises RoomFailed if the engine cannot receive it, or is not ready within
        `offer.timeout_s` seconds."""
        if self._incoming:
            self._incoming.fail(f"version {offer.version} was offered")
        try:
            async with asyncio.timeout(offer.timeout_s):
                async with self._mapping:
                    deadline = time.monotonic() + offer.timeout_s
                    self._serial += 1
                    self._incoming = incoming = _Incoming(offer, self._serial, deadline)
                    await self._start(offer, self._serial, self._open_pipe())
                await asyncio.shield(incoming.ready)
        except TimeoutError:
            raise RoomFailed(
                f"the engine was not ready to receive version {offer.version} in {offer.timeout_s:.0f} s"
            ) from None

    @asynccontextmanager
    async def fetched(self, number: int, published: PublishedWeights, *, whole: bool = False) -> AsyncIterator[Arrived]:
        """Context manager: yields the bytes of `published` once they are in this node's memory. Takes the bytes that
        were broadcast to replica `number`; if these do not arrive, fetches bytes on demand. Fetches only the delta if
        there is one, `whole` is False, and this replica's memory `self.landing` holds the version to which the delta
        applies. Other processes can map the bytes until the end of the `async with` block. Raises RoomFailed if the
        bytes are not available."""
        version = published.identity.version
        applies = not whole and self.base is not None and self.base == published.manifest.base
        refusal = "its changes were refused" if whole else await self._why_not(number, published)
        if not refusal:
            async with self._mapping:
                incoming = self._incoming
                if incoming and incoming.is_of(published.identity):
                    regions = incoming.arrived.result()
                    buckets = [region.map() for region in regions if region.path != ON_DEVICE]
                    sizes = incoming.offer.sizes
                    changes = [region.nbytes < size for region, size in zip(regions, sizes, strict=True)]
                    if applies or not any(changes):
                        log.info("inference replica %d takes version %d as it was broadcast", number, version)
                        yield self._landed(published, Arrived(regions, buckets), changes)
                        return
                    refusal = "it has not the version to which the changes apply"
                else:
                    refusal = "another version was offered"
        if published.session:
            log.warning("inference replica %d takes version %d on demand: %s", number, version, refusal)
        stored = self._transport.with_changes(published.source)
        if stored and applies:
            buckets = await stored.open_changes()
            changes = [reference is not None for reference in stored.changes]
        else:
            buckets = list(await self._transport.open(published.source))
            changes = [False] * len(buckets)
        async with self._mapped(buckets) as arrived:
            yield self._landed(published, arrived, changes)

    def _landed(self, published: PublishedWeights, arrived: Arrived, changes: Sequence[bool]) -> Arrived:
        """Returns `arrived` without a change if only whole versions travel. Otherwise returns the regions of `landing`
        for the buckets of `published`, and what the engine's rank 0 writes there: for each bucket the bytes in
        `arrived`, which are changes if `changes` says so."""
        if not self._delta:
            return arrived
        steps = tuple(map(BucketStep, arrived.regions, changes))
        return Arrived(self.landing.regions(Layout(published.manifest.entries).sizes), arrived.buckets, steps)

    @asynccontextmanager
    async def _mapped(self, buckets: list[npt.NDArray[np.uint8]]) -> AsyncIterator[Arrived]:
        """Context manager: yields the fetched `buckets`, and the regions where other processes can map them until the
        end of the `async with` block. If other processes cannot map the buckets where they lie, copies the buckets
        first."""
        mapped = await asyncio.to_thread(regions_of, buckets, [os.getpid(), os.getppid()])  # the parent: the raylet
        if mapped is not None:
            yield Arrived(mapped, buckets)
            return
        self._warn_of_copies()
        landing = Landing()  # the file exists as long as this
        regions = await asyncio.to_thread(landing.copy, buckets)
        yield Arrived(regions, [region.map() for region in regions])

    async def _why_not(self, number: int, published: PublishedWeights) -> str:
        """Waits until `published` has arrived by broadcast to replica `number`, and returns "". Returns a reason if it
        does not arrive."""
        if published.session is None:  # another transport, or a loop that makes no offers
            return "there is no session"
        if number not in published.session.members:
            return "it is not in the session: it joined later, or was not ready in time"
        incoming = self._incoming
        if incoming is None or not incoming.is_of(published.identity):
            return "its engine was started anew, or another version was offered"
        await self.settled()
        if not incoming.arrived.done():
            return f"not all has arrived in the {incoming.offer.timeout_s:.0f} s that it may take"
        return str(incoming.arrived.exception() or "")

    async def settled(self) -> None:
        """Waits until the offered version has arrived or failed, at most GRACE_S seconds beyond the offer's time."""
        incoming = self._incoming
        if incoming:
            left_s = max(incoming.deadline + GRACE_S - time.monotonic(), 0.0)
            await asyncio.wait({incoming.arrived}, timeout=left_s)

    def lose_engine(self) -> None:
        """Forgets the offered version, because the engine that received it has ended."""
        if self._incoming:
            self._incoming.fail("its engine has ended")
        self._incoming = None

    def close(self) -> None:
        """Closes the pipe to which the engine's rank 0 writes."""
        if self._pipe:
            asyncio.get_running_loop().remove_reader(self._pipe[0])
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    def _warn_of_copies(self) -> None:
        if not self._copies:
            log.warning(
                "the engine's process cannot map what the object store has (the raylet, process %d, may run as another "
                "user): every update copies the weights once more",
                os.getppid(),
            )
        self._copies = True

    def _open_pipe(self) -> str:
        """Opens the pipe for the engine's messages if it is not open. Returns the path by which another process of this
        user can write to it."""
        if self._pipe is None:
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            asyncio.get_running_loop().add_reader(self._pipe[0], self._read)
        return f"/proc/{os.getpid()}/fd/{self._pipe[1]}"

    def _read(self) -> None:
        assert self._pipe is not None
        self._unread += os.read(self._pipe[0], 65536)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if self._incoming and self._incoming.serial == message["serial"]:
                self._incoming.hear(message)
