"""Weights travel by broadcasts: each trainer rank sends all buckets to its part of the replicas, while it packs the
buckets.

Each rank keeps its share of the last two versions in its own memory, for checkpoints, for replicas that join and for
replicas that were left out. They fetch single buckets on demand (`trainer.actor.ShardActor.bucket`). The source of a
version names the actors that keep its buckets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import RayError

from trireme.core.transport import Sender
from trireme.process import waits

AT_ONCE = 4
"""Buckets that a receiver asks for at the same time."""
ANSWER_S = 30.0
"""Time limit for a lease, which only a process that hangs does not answer at once."""


@dataclass(frozen=True)
class KeptPart:
    """Says where one trainer rank keeps its share of the buckets of a published version. `join` makes a `Source` from
    the KeptParts of all ranks."""

    version: int
    buckets: int
    """Number of all buckets of the version."""
    holder: Any
    """Handle of the actor that keeps this rank's share."""


@dataclass(frozen=True)
class Source:
    """Says where receivers find the bytes of a published version."""

    version: int
    buckets: int
    """Number of buckets."""
    holders_R: tuple[Any, ...]
    """For each trainer rank the handle of the actor that keeps its share: bucket b is in the share of rank b mod R."""


def make_sender(
    rank: int, size: int, ports: Sequence[int] = (), *, delta: bool = False, shares_device: bool = False
) -> Sender:
    """Makes the sender of trainer rank `rank` of `size`. Call it in the rank's actor, because this actor also serves
    the buckets that the rank keeps. `ports`: where the sender may listen; empty: any. `delta`: only what
    changed is sent (`trireme.transports.delta`). `shares_device`: replicas on this rank's device receive through slabs
    (`trireme.transports.slabs`)."""
    from trireme.transports.sending import BroadcastSender  # imports torch, which receivers do not need

    host = ray.util.get_node_ip_address()
    holder = ray.get_runtime_context().current_actor
    return BroadcastSender(rank, size, host, holder, ports, delta=delta, shares_device=shares_device)


def join(parts_R: Sequence[KeptPart]) -> Source:
    first = parts_R[0]
    return Source(first.version, first.buckets, tuple(part.holder for part in parts_R))


async def open(source: Source, numbers: Sequence[int] | None = None) -> list[npt.NDArray[np.uint8]]:
    """Fetches the buckets `numbers` of a version, by default all, from the trainer's memory, some at the same time.
    Returns them in this order as read-only arrays. Raises the failure of a trainer shard."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def take(number: int) -> npt.NDArray[np.uint8]:
        rank = number % len(source.holders_R)
        async with turns:
            try:
                bucket: npt.NDArray[np.uint8] = await source.holders_R[rank].bucket.remote(source.version, number)
            except RayError as error:
                owner = f"trainer shard {rank}, asked for bucket {number} of version {source.version}"
                raise waits.failure(error, owner, None) from error
            return bucket

    if numbers is None:
        numbers = range(source.buckets)
    return list(await asyncio.gather(*map(take, numbers)))


def with_changes(source: Source) -> None:
    """Returns None: what is fetched on demand is whole."""


def lease(source: Source) -> None:
    """Makes each trainer rank keep its share of the version until `release`. Raises WeightsGone if a rank no longer has
    the version, and RoomFailed if a rank fails or does not answer."""
    leases = [holder.lease.remote(source.version) for holder in source.holders_R]
    owners = [f"trainer shard {rank}, asked to keep version {source.version}" for rank in range(len(leases))]
    waits.get_all(leases, owners=owners, timeout_s=ANSWER_S)


def release(source: Source, ranks: Sequence[int]) -> None:
    """Ends one lease of the version on each of the trainer's `ranks`, without waiting."""
    for rank in ranks:
        source.holders_R[rank].release.remote(source.version)
