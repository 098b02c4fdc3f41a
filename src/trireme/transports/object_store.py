"""Weights travel through Ray's object store: each rank puts its share of the buckets, each node fetches one copy.

The source of a version is the tuple of references to its buckets. The bytes live as long as a process holds the
references, so a replica that joins late and a checkpoint can read them too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import ray

from trireme.core.actors import Ref
from trireme.core.transport import Sender, join_parts


def make_sender(rank: int, size: int, ports: Sequence[int] = ()) -> Sender:
    from trireme.transports.packing import Packer  # imports torch, which receivers do not need

    return Packer(ray.put, rank, size)


join = join_parts


async def open(source: Sequence[Ref[npt.NDArray[np.uint8]]]) -> list[npt.NDArray[np.uint8]]:
    """Returns the buckets of a version in order, as read-only views of the node's object store."""
    return list(await asyncio.gather(*source))


def lease(source: object) -> None:
    """Does nothing: the references that a receiver holds keep the bytes."""


def release(source: object) -> None:
    """Does nothing: the references end with their holders."""
