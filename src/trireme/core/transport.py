"""The seam between *what* is published (`trireme.core.weights.WeightsManifest`) and *how* it travels: the transports.

    trainer ranks --Sender.send(layout, units, session)--> parts --Transport.join--> source --Transport.open--> buckets

The layout (`trireme.core.weights.Layout`) says where each tensor lies in which bucket. It is the same for every version
of a run, and every rank knows it before anything is gathered. Bucket b belongs to rank b mod R: the buckets of a rank
are its share. The source belongs to the transport: small, picklable, opaque to all others. Replicas open it; for a
checkpoint each rank opens its share, and writes files from it. Whatever the transport, a receiver checks the digest of
the bytes, and each replica's canary proves their use. A new transport is a module in `trireme.transports` and a line in
`TRANSPORTS`.

*Sessions.* A `Session` here is the transfer of one version to a fixed group of replicas. Some transports need it. The
trainer makes an `Offer`; the replica set asks the replicas, and answers with a session of the replicas that are ready
in time. All others are left out before anything is sent. A replica outside the session, and a checkpoint, open the same
source, which also serves single buckets on demand.

*Groups.* The replicas of a node follow each other in the chain of one rank, so that one copy of the bytes reaches the
node, however many replicas it has (`servers_of`). The nodes are shared out over one rank of each training node.

*Tensor-parallel receivers.* The ranks of an engine share a node. Its rank 0 alone receives, into memory that the other
ranks map: the bytes arrive once, and vLLM's loaders keep each rank's part.

*Memory.* A sender has two buckets in addition to the buckets that it keeps for later receivers, and a copy of the
newest version if it broadcasts changes. A receiver holds a whole version in host memory, in addition to the loaded one:
it could load each bucket as it arrives only while its requests stand still, and they continue until all has arrived and
is checked. The plan counts what `TransportKind` says.
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
    """The facts about a transport that configuration and plan need, so that neither has to import the transport's
    module."""

    module: str
    """The name of the module that implements `Transport`; it is imported when it is first used."""
    stored: bool = False
    """True: versions lie in Ray's object store, whole on each machine with a replica. False: each rank of the trainer
    keeps its share of them in its own memory."""
    received: bool = False
    """True: a replica receives a version into memory of its own. False: it maps the stored version, and needs memory of
    its own only if changes travel."""
    slabs: bool = False
    """True: if a replica is on the same device as the rank that sends to it, it receives through memory that both
    processes map. If this device is a GPU, the version arrives in the GPU's memory."""


TRANSPORTS = {
    "object_store": TransportKind("trireme.transports.object_store", stored=True),
    "broadcast": TransportKind("trireme.transports.broadcast", received=True),
    "ipc": TransportKind("trireme.transports.ipc", received=True, slabs=True),
}
"""{value of `inference.transport`: the transport}. The value "auto" stands for one of these transports."""
DEFAULT = "object_store"

Endpoint = tuple[str, int]
"""The address of a node, and a port."""
TRIALS = 2
"""If sending between GPUs fails at one of the first TRIALS versions, no further version is sent, and replicas fetch the
bytes. While the first version of a run is sent, replicas decode requests of their own; while the second is sent, they
decode the run's."""
READY_PART = 10
"""Replicas have one READY_PART-th of an offer's time to report that they are ready."""


@dataclass(frozen=True)
class Offer:
    """The trainer's offer to replicas to take part in the sending of a version."""

    attempt: int
    version: int
    sizes: tuple[int, ...]
    """Bytes of each bucket, in the order in which they are sent."""
    endpoints_R: tuple[Endpoint, ...]
    """For each rank of the trainer, the address of its node and a port at which receivers find it."""
    timeout_s: float
    """Seconds from the offer until all is sent, or sending is abandoned."""
    server: int = 0
    """The rank of the trainer that will send to the replica that gets this offer. The replica set, which knows all
    replicas and their nodes, sets it for each replica."""

    @property
    def senders(self) -> list[int]:
        """The ranks that send: the first rank of each node of the trainer. If several ranks of a node sent, several
        copies would pass through the node's network card. Fewer senders cost no time, because a long chain of replicas
        takes as long as a chain of one.

        >>> Offer(1, 0, (), (("a", 1), ("a", 2), ("b", 1)), 1.0).senders
        [0, 2]
        """
        hosts = [endpoint[0] for endpoint in self.endpoints_R]
        return [hosts.index(host) for host in dict.fromkeys(hosts)]

    @property
    def ready_s(self) -> float:
        """Seconds within which replicas have to report that they are ready. This is a small part of `timeout_s`,
        because the trainer stands still meanwhile. It is enough, because an engine begins to receive between two of its
        decoding steps. The rest of `timeout_s` is for sending."""
        return self.timeout_s / READY_PART


@dataclass(frozen=True)
class Session:
    """The transfer of one version to a fixed set of replicas: says which replicas take part, and which trainer rank
    sends to each of them. (It is not an agent's session.)"""

    attempt: int
    epoch: int
    """The number of the communication groups: higher than in the transfer before if the members differ, because new
    groups are made then; otherwise equal, and the groups are used again. A process that replaces a lost replica is a
    different member, although it has the replica's number."""
    servers: Mapping[int, int]
    """{number of a replica that reported ready in time: the trainer rank that sends to it}. The replicas of a rank are
    in forwarding order: the rank sends to the first, which passes the bytes to the second, and so on."""
    left_s: float = 0.0
    """Seconds from the moment when the trainer's ranks get this object until sending is abandoned. The trainer's
    handle, which made the offer, sets it."""

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the replicas that take part, ascending."""
        return tuple(sorted(self.servers))

    def served_by(self, rank: int) -> tuple[int, ...]:
        """Returns the numbers of the replicas that rank `rank` sends to, in forwarding order.

        >>> Session(1, 0, {0: 0, 3: 1, 1: 1, 4: 0}).served_by(1)
        (3, 1)
        """
        return tuple(member for member, server in self.servers.items() if server == rank)


def servers_of(nodes: Mapping[int, str], ranks: Sequence[int]) -> dict[int, int]:
    """Chooses the trainer rank that sends to each replica. Returns {replica: its rank, one of `ranks`}. The order of
    the dict is the order in which the replicas of a rank forward the bytes to each other; replicas on the same node
    follow each other. `nodes`: {number of the replica: its node}; a replica on an unknown node ("") counts as a node of
    its own.

    >>> servers_of({0: "a", 1: "b", 2: "a", 3: "", 4: ""}, [0, 8])
    {0: 0, 2: 0, 1: 8, 3: 0, 4: 8}
    """
    groups: dict[object, list[int]] = {}
    for replica, node in nodes.items():
        groups.setdefault(node or replica, []).append(replica)
    return {replica: ranks[number % len(ranks)] for number, group in enumerate(groups.values()) for replica in group}


class Epochs:
    """Counts the epochs of transfers (`Session.epoch`). Consecutive transfers with the same members belong to one epoch
    and use the same communication groups. A transfer with other members begins a new epoch."""

    def __init__(self) -> None:
        self.number = 0
        self._last: object = None

    def begins(self, members: object) -> bool:
        """Records the members of a transfer, given as any value that is equal for equal members. If they differ from
        the members of the transfer before, counts a new epoch and returns True; otherwise returns False."""
        begins = members != self._last
        self.number += begins
        self._last = members
        return begins


@dataclass(frozen=True)
class StoredVersion:
    """A source, from which receivers get the bytes of a version. For each bucket (a byte array with several tensors) it
    has an awaitable reference to the whole bucket, and maybe one to the bucket's changes since the base."""

    buckets: tuple[BucketRef, ...]
    changes: tuple[BucketRef | None, ...]
    """For each bucket a reference to what changed since the base, the earlier version that the manifest names. None:
    there is no such version, or the changes are not much smaller than the whole bucket."""

    async def open_changes(self) -> list[npt.NDArray[np.uint8]]:
        """Returns one uint8 array for each bucket: the bucket's changes since the base, or the whole bucket if
        `changes` has None for it. Together with the base, the arrays give this version."""
        return list(
            await asyncio.gather(*(changes or whole for whole, changes in zip(self.buckets, self.changes, strict=True)))
        )


def join_parts(parts_R: Sequence[Mapping[int, Stored]]) -> tuple[Stored, ...]:
    """Returns all buckets of a version, sorted by bucket number. `parts_R`: for each trainer rank, {number of a bucket:
    the bucket, or a reference to it}."""
    joined = {bucket: reference for part in parts_R for bucket, reference in part.items()}
    return tuple(joined[bucket] for bucket in range(len(joined)))


class Sender(Protocol):
    """The sending end of a transport, in each shard of the trainer."""

    @property
    def endpoint(self) -> Endpoint | None:
        """The address and the port at which receiving replicas find this rank, for `Offer.endpoints_R`. None if this
        rank sends to no `Session`: any replica that opens the source can receive. It may become None after any of the
        first TRIALS versions that were sent."""

    def send(
        self, version: int, layout: Layout, units: Iterable[Sequence[tuple[str, Tensor]]], session: Session | None
    ) -> object:
        """Sends the tensors of `version`. Returns this rank's part of the source, from which receivers can get the
        bytes later (`Transport.join`, `Transport.open`). `units`: lists of (name, tensor) in the order of `layout`; the
        tensors of a unit live until the next unit is taken. `session`: the replicas to send to now; None: this call
        only stores the bytes, and replicas get them when they open the source. Collective: every rank must call it and
        take all units in order, because gathering a unit is collective too."""


class Transport(Protocol):
    """A module in `trireme.transports`, with the functions of both ends."""

    def make_sender(self, rank: int, size: int, ports: Sequence[int] = (), *, delta: bool = False) -> Sender:
        """Makes the sending end for rank `rank` of the trainer's `size` ranks. If the sender listens, it uses one of
        `ports` (`cluster.ports`). `delta`: the sender also sends the changes since the version before."""

    def join(self, parts_R: Sequence[object]) -> object:
        """Returns the source of a version, from which `open` gets the bytes. `parts_R`: what `Sender.send` returned on
        each rank."""

    async def open(self, source: object, numbers: Sequence[int] | None = None) -> Sequence[npt.NDArray[np.uint8]]:
        """Waits until this process has the buckets `numbers` of `source`, by default all. Returns them in this order,
        as uint8 arrays that may be read-only. Raises if the bytes are not available, for example because the sender is
        dead. Replicas call this function, and so do shards that write a checkpoint."""

    def with_changes(self, source: object) -> StoredVersion | None:
        """Returns `source` as a StoredVersion if it contains, in addition to the whole buckets, what changed in them
        since the base; None if it contains only the whole buckets."""

    def lease(self, source: object) -> None:
        """Keeps the bytes of `source` until `release`, even if newer versions are published: a checkpoint reads them
        later, while training continues. Raises WeightsGone if the bytes are gone already."""

    def release(self, source: object, ranks: Sequence[int]) -> None:
        """Ends the lease of the bytes that the trainer's `ranks` store of `source`, without waiting."""


def load_transport(name: str) -> Transport:
    """Imports the module of the transport `name`, a key of `TRANSPORTS`, and returns it. If `name` is "auto", returns
    the module of DEFAULT: a configuration still says "auto" if no plan has chosen a transport."""
    return cast(Transport, importlib.import_module(TRANSPORTS[DEFAULT if name == "auto" else name].module))
