"""The seam between *what* is published (`trireme.core.weights.WeightsManifest`) and *how* it travels: the transports.

    trainer ranks --Sender.send(layout, units, session)--> parts --Transport.join--> source --Transport.open--> buckets

The layout (`trireme.core.weights.Layout`) says where each tensor lies in which bucket. It is the same for every version
of a run, and every rank knows it before anything is gathered. Bucket b belongs to rank b mod R: the buckets of a rank
are its share. The source belongs to the transport: small, picklable, opaque to all others. Replicas open it,
checkpoints too (they write files from the bytes). Whatever the transport, a receiver checks the digest of the bytes,
and each replica's canary proves their use. A new transport is a module in `trireme.transports` and a line in
`TRANSPORTS`.

*Sessions.* Some transports send to a fixed group of replicas. The trainer makes an `Offer`, the replica set asks the
replicas and answers with the `Session` of those that are ready in time; the others are left out before anything is
sent. A replica outside the session, and a checkpoint, open the same source, which also serves single buckets on demand.

*Groups.* The replicas of a node follow each other in the chain of one rank, so that one copy of the bytes reaches the
node, however many replicas it has (`servers_of`). The nodes are shared out over one rank of each training node.

*Tensor-parallel receivers.* The ranks of an engine share a node. Its rank 0 alone receives, into memory that the others
map: the bytes arrive once, and vLLM's loaders keep each rank's part.

*Memory.* A sender has two buckets in addition to the buckets that it keeps for later receivers. A receiver holds a
whole version in host memory, in addition to the loaded one: it could load each bucket as it arrives only while its
requests stand still, and they continue until all has arrived and is checked. The plan counts what `TransportKind`
says.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from trireme.core.actors import Ref
from trireme.core.weights import Layout

if TYPE_CHECKING:
    from torch import Tensor


Stored = TypeVar("Stored")
BucketRef = Ref[npt.NDArray[np.uint8]]


@dataclass(frozen=True)
class TransportKind:
    """The facts about a transport that configuration and plan need, so that they do not import its module."""

    module: str
    """Implements `Transport`; imported when used."""
    stored: bool = False
    """True: versions lie in Ray's object store, whole on each machine with a replica. False: each rank of the trainer
    keeps its share of them in its own memory."""
    received: bool = False
    """True: a replica receives a version into memory of its own. False: it maps that of the sender, unless changes
    travel."""


TRANSPORTS = {
    "object_store": TransportKind("trireme.transports.object_store", stored=True),
    "broadcast": TransportKind("trireme.transports.broadcast", received=True),
}
"""Transports by the name that `inference.transport` chooses."""

Endpoint = tuple[str, int]
"""The address of a node, and a port."""
READY_PART = 10
"""The part of an offer's time in which replicas say that they are ready."""


@dataclass(frozen=True)
class Offer:
    """The trainer's offer to replicas to take part in the sending of a version."""

    attempt: int
    version: int
    sizes: tuple[int, ...]
    """Bytes of each bucket, in the order in which they are sent."""
    endpoints_R: tuple[Endpoint, ...]
    """Where each rank of the trainer can be found: the address of its node, and a port."""
    timeout_s: float
    """Seconds from the offer until all is sent, or sending is abandoned."""
    server: int = 0
    """The rank that sends to the replica that is asked; the replica set, which knows all replicas, tells each one."""

    @property
    def senders(self) -> list[int]:
        """The ranks that send: the first one of each node. More of them would send more copies through the network card
        of their node, and a chain takes as long for many replicas as for one.

        >>> Offer(1, 0, (), (("a", 1), ("a", 2), ("b", 1)), 1.0).senders
        [0, 2]
        """
        hosts = [endpoint[0] for endpoint in self.endpoints_R]
        return [hosts.index(host) for host in dict.fromkeys(hosts)]

    @property
    def ready_s(self) -> float:
        """Seconds in which replicas have to say that they are ready. Short, because an engine needs one step for it,
        the trainer stands still meanwhile, and most of the time is for sending."""
        return self.timeout_s / READY_PART


@dataclass(frozen=True)
class Session:
    """The replicas that take part in the sending of one version, and the rank that sends to each."""

    attempt: int
    epoch: int
    """Higher than in the last session if the members differ: then new groups are made, else groups are reused. A
    successor of a replica is another member under the same number."""
    servers: Mapping[int, int]
    """{number of a replica that reported ready in time: the rank that sends to it}, in the order in which the members
    of a group follow each other."""
    left_s: float = 0.0
    """Seconds until sending is abandoned, from when the trainer's ranks learn of the session; the trainer's handle,
    which made the offer, knows them."""

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the replicas, ascending."""
        return tuple(sorted(self.servers))

    def served_by(self, rank: int) -> tuple[int, ...]:
        """Returns the members that rank `rank` sends to, in order.

        >>> Session(1, 0, {0: 0, 3: 1, 1: 1, 4: 0}).served_by(1)
        (3, 1)
        """
        return tuple(member for member, server in self.servers.items() if server == rank)


def servers_of(nodes: Mapping[int, str], ranks: Sequence[int]) -> dict[int, int]:
    """Returns {replica: which of the trainer's `ranks` sends to it}, with the replicas of a node after each other.
    `nodes`: {number of the replica: its node}; a replica on an unknown node ("") counts as a node of its own.

    >>> servers_of({0: "a", 1: "b", 2: "a", 3: "", 4: ""}, [0, 8])
    {0: 0, 2: 0, 1: 8, 3: 0, 4: 8}
    """
    groups: dict[object, list[int]] = {}
    for replica, node in nodes.items():
        groups.setdefault(node or replica, []).append(replica)
    return {replica: ranks[number % len(ranks)] for number, group in enumerate(groups.values()) for replica in group}


class Epochs:
    """Numbers the epochs of sessions: a new one begins when a session has other members than the last session."""

    def __init__(self) -> None:
        self.number = 0
        self._last: object = None

    def begins(self, members: object) -> bool:
        """Records the members of a session, given as any value that is equal for equal members. Returns True, and
        counts a new epoch, if they differ from the last session's."""
        begins = members != self._last
        self.number += begins
        self._last = members
        return begins


@dataclass(frozen=True)
class StoredVersion:
    """A source of buckets and of changes, with references that can be awaited."""

    buckets: tuple[BucketRef, ...]
    changes: tuple[BucketRef | None, ...]
    """What changed in each bucket since the version that the manifest names as base; None: there is no such version, or
    the whole bucket is not much larger."""

    async def open_changes(self) -> list[npt.NDArray[np.uint8]]:
        """Returns for each bucket what leads from the base of the version to the version: its changes, or the whole
        bucket."""
        return list(
            await asyncio.gather(*(changes or whole for whole, changes in zip(self.buckets, self.changes, strict=True)))
        )


def join_parts(parts_R: Sequence[Mapping[int, Stored]]) -> tuple[Stored, ...]:
    """Returns the buckets of all ranks in order of their numbers. `parts_R`: for each rank, {number of a bucket: the
    bucket, or a reference to it}."""
    joined = {bucket: reference for part in parts_R for bucket, reference in part.items()}
    return tuple(joined[bucket] for bucket in range(len(joined)))


class Sender(Protocol):
    """The sending end of a transport, in each shard of the trainer."""

    @property
    def endpoint(self) -> Endpoint | None:
        """Where replicas that receive find it, for `Offer.endpoints_R`; None if the transport has no sessions."""

    def send(
        self, version: int, layout: Layout, units: Iterable[Sequence[tuple[str, Tensor]]], session: Session | None
    ) -> object:
        """Sends the tensors of `version`; returns this rank's part of the source. `units`: lists of (name, tensor), in
        the order of `layout`; the tensors of a unit live until the next unit is taken. `session`: the replicas to
        send to; None: none. Collective: every rank calls it and takes each unit once, in turn, because gathering a
        unit is collective too."""


class Transport(Protocol):
    """A module in `trireme.transports`, with the functions of both ends."""

    def make_sender(self, rank: int, size: int, ports: Sequence[int] = (), *, delta: bool = False) -> Sender:
        """Makes the sending end for rank `rank` of `size`. If it listens, it does so at one of `ports`
        (`cluster.ports`). `delta`: it also sends what changed since the version before."""

    def join(self, parts_R: Sequence[object]) -> object:
        """Returns the source of a version. `parts_R`: what `Sender.send` returned on each rank."""

    async def open(self, source: object) -> Sequence[npt.NDArray[np.uint8]]:
        """Waits until all bytes of `source` are in this process, which is a replica or writes a checkpoint. Returns the
        buckets, uint8 arrays that may be read-only. Raises if the bytes cannot be had, for example because the
        sender is dead."""

    def lease(self, source: object) -> None:
        """Keeps the bytes of `source` until `release`, even if newer versions are published: a checkpoint reads them
        later, alongside training. Raises WeightsGone if they are gone already."""

    def release(self, source: object) -> None:
        """Ends the lease of `source`, without waiting."""


def load_transport(name: str) -> Transport:
    """Imports and returns the module of the transport `name`, a key of `TRANSPORTS`."""
    return cast(Transport, importlib.import_module(TRANSPORTS[name].module))
