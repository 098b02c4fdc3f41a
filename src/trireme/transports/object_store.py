"""Sends weights through Ray's object store. Each rank of the trainer puts its buckets into the store. Each node with
replicas fetches one copy of every bucket.

The source of a version is a tuple of references to its buckets. Ray keeps the bytes as long as a process holds the
references, so a replica that joins later, and a checkpoint, can read them too.

With `inference.encoding = "delta"` a rank also puts what changed in each bucket since the previous version. Nodes fetch
these changes. The whole buckets stay on the trainer's nodes until a replica that joins or missed a version needs them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import ray

from trireme.core.transport import BucketRef, Sender, StoredVersion, join_parts
from trireme.process import waits
from trireme.transports import delta as codec

BASE_S = 60.0
"""Seconds. Time limit for reading a bucket of the version before, which is in this node's memory unless Ray moved it to
a disk."""
Bucket = npt.NDArray[np.uint8]


class ChangesStore:
    """Puts the buckets of a rank into Ray's object store, and also each bucket's changes since the previous version.
    `put` stores an array and returns a reference; `get` returns the array of a reference."""

    def __init__(self, put: Callable[[Bucket], BucketRef], get: Callable[[BucketRef], Bucket]) -> None:
        codec.warm_up()
        self._put = put
        self._get = get
        self._before: dict[int, BucketRef] = {}

    def put(self, number: int, bucket: Bucket) -> tuple[BucketRef, BucketRef | None]:
        """Stores `bucket`, and its changes since the version before. Returns references to both, for `StoredVersion`;
        None for the changes if there was no version before, or if they are not much smaller than the bucket."""
        before = self._before.get(number)
        self._before[number] = stored = self._put(bucket)
        changes = codec.encode(self._get(before), bucket) if before is not None else None
        return stored, None if changes is None else self._put(changes)


def make_sender(rank: int, size: int, ports: Sequence[int] = (), *, delta: bool = False) -> Sender:
    from trireme.transports.packing import Packer  # imports torch, which receivers do not need

    if delta:
        owner = "the object store of this node, asked for a bucket of the version before"
        get = partial(waits.get, owner=owner, timeout_s=BASE_S)
        return Packer(ChangesStore(ray.put, get).put, rank, size)
    return Packer(lambda _, bucket: ray.put(bucket), rank, size)


def join(
    parts_R: Sequence[Mapping[int, BucketRef | tuple[BucketRef, BucketRef | None]]],
) -> tuple[BucketRef, ...] | StoredVersion:
    joined = join_parts(parts_R)
    pairs = [pair for pair in joined if isinstance(pair, tuple)]
    if pairs:
        return StoredVersion(tuple(whole for whole, _ in pairs), tuple(changes for _, changes in pairs))
    return tuple(reference for reference in joined if not isinstance(reference, tuple))


async def open(source: StoredVersion | Sequence[BucketRef], numbers: Sequence[int] | None = None) -> list[Bucket]:
    """Returns the buckets `numbers` of a version, by default all, as read-only views of the node's object store."""
    buckets = source.buckets if isinstance(source, StoredVersion) else source
    if numbers is None:
        numbers = range(len(buckets))
    return list(await asyncio.gather(*(buckets[number] for number in numbers)))


def with_changes(source: object) -> StoredVersion | None:
    return source if isinstance(source, StoredVersion) else None


def lease(source: object) -> None:
    """Does nothing, because Ray keeps the bytes while the caller holds the references in `source`."""


def release(source: object, ranks: Sequence[int]) -> None:
    """Does nothing: Ray frees the bytes by itself, once the last reference to them is gone."""
