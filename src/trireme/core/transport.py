"""The seam between *what* is published (`trireme.core.weights.WeightsManifest`) and *how* it travels: the transports.

    trainer ranks --Sender.send(layout, units, session)--> parts --Transport.join--> source --Transport.open--> buckets

The layout (`trireme.core.weights.Layout`) says where each tensor lies in which bucket. It is the same for every version
of a run, and every rank knows it before anything is gathered. Bucket b belongs to rank b mod R: the buckets of a rank
are its share. The source belongs to the transport: small, picklable, opaque to all others. Replicas open it, commits
too (they write files from the bytes). Whatever the transport, a receiver checks the digest of the bytes, and each
replica's canary proves their use. A new transport is a module in `trireme.transports` and a line in `TRANSPORTS`.

*Sessions.* Some transports send to a fixed group of replicas. The trainer makes an `Offer`, the replica set asks the
replicas and answers with the `Session` of those that are ready in time; the others are left out before anything is
sent. A replica outside the session, and a commit, open the same source, which also serves single buckets on demand.

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

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from trireme.core.weights import Layout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TransportKind:
    """A transport as the configuration and the plan see it, which do not import its module."""

    module: str
    """Implements `Transport`; imported when used."""
    stored: bool = False
    """True: versions lie in Ray's object store, whole on each machine with a replica. False: each rank of the trainer
    keeps its share of them in its own memory."""
    received: bool = False
    """True: a replica receives a version into memory of its own. False: it maps that of the sender."""


TRANSPORTS = {
    "object_store": TransportKind("trireme.transports.object_store", stored=True),
    "broadcast": TransportKind("trireme.transports.broadcast", received=True),
}
"""Transports by the name that `inference.transport` chooses."""

READY_PART = 10
"""The part of an offer's time in which replicas say that they are ready."""


@dataclass(frozen=True)
class Offer:
    """The trainer's offer to replicas before it sends a version to a group of them."""

    attempt: int
    version: int
    sizes: tuple[int, ...]
    """Bytes of each bucket, in the order in which they are sent."""
    endpoints_R: tuple[Any, ...]
    """Where each rank of the trainer can be found: the address of its node, and a port."""
    timeout_s: float
    """Seconds from the offer until all is sent, or sending is abandoned."""
    server: int = 0
    """The rank that sends to the replica that is asked; the replica set, which knows all replicas, tells each one."""

    @property
    def senders(self) -> list[int]:
        """The ranks that send: the first of each node. More of them would send more copies through the card of their
        node, and a chain takes as long for many replicas as for one.

        >>> Offer(1, 0, (), (("a", 1), ("a", 2), ("b", 1)), 1.0).senders
        [0, 2]
        """
        hosts = [endpoint[0] for endpoint in self.endpoints_R]
        return [hosts.index(host) for host in dict.fromkeys(hosts)]

    @property
    def ready_s(self) -> float:
        """Seconds that replicas have to say that they are ready: it takes an engine one step, the trainer stands still
        meanwhile, and most of the time is for sending."""
        return self.timeout_s / READY_PART


@dataclass(frozen=True)
class Session:
    """The replicas that take part in sending one version."""

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
    """Returns which of the `ranks` sends to which replica, the replicas of a node after each other. `nodes`: {number of
    the replica: its node}; a replica without a known node ("") has a rank to itself.

    >>> servers_of({0: "a", 1: "b", 2: "a", 3: "", 4: ""}, [0, 8])
    {0: 0, 2: 0, 1: 8, 3: 0, 4: 8}
    """
    groups: dict[object, list[int]] = {}
    for replica, node in nodes.items():
        groups.setdefault(node or replica, []).append(replica)
    return {replica: ranks[number % len(ranks)] for number, group in enumerate(groups.values()) for replica in group}


class Epochs:
    """Counts how often the members of sessions changed."""

    def __init__(self) -> None:
        self.number = 0
        self._last: Any = None

    def begins(self, members: object) -> bool:
        """Records the members of a session, as any values that distinguish them. Returns True if they differ from the
        last session's: then an epoch begins."""
        begins = members != self._last
        self.number = self.number + begins
        self._last = members
        return begins


def join_parts(parts_R: Sequence[Mapping[int, object]]) -> tuple[object, ...]:
    """Returns the buckets of all ranks in order; each rank has its share."""
    joined = {bucket: reference for part in parts_R for bucket, reference in part.items()}
    return tuple(joined[bucket] for bucket in range(len(joined)))


class Sender(Protocol):
    """One end of a transport, in each shard of the trainer."""

    endpoint: Any
    """Where replicas that receive find it, for `Offer.endpoints_R`; None if the transport has no sessions."""

    def send(
        self, version: int, layout: Layout, units: Iterable[Sequence[tuple[str, Tensor]]], session: Session | None
    ) -> object:
        """Sends the named tensors of one version; returns this rank's part of the source. Collective: every rank calls
        it, and takes each unit once, in turn, because gathering a unit is collective too. Tensors come in the order of
        the layout and live until the next unit."""


class Transport(Protocol):
    """A module that has both ends."""

    def make_sender(self, rank: int, size: int, ports: Sequence[int] = ()) -> Sender:
        """Makes the end of rank `rank` of `size`, which listens at one of `ports` (`cluster.ports`) if it listens."""

    def join(self, parts_R: Sequence[Any]) -> Any:
        """Returns the source, from the results of `send` of all ranks."""

    async def open(self, source: Any) -> Sequence[npt.NDArray[np.uint8]]:
        """Returns the buckets, uint8 arrays that may be read-only, when all their bytes are here: in a replica, or
        where a commit is written. Raises when they cannot be had, for example because the sender is dead."""

    def lease(self, source: object) -> None:
        """Keeps the bytes until `release`, whatever is published meanwhile: a commit that is written alongside training
        reads them later. Raises WeightsGone if it is too late."""

    def release(self, source: Any) -> None:
        """Ends a lease, without waiting."""


def load_transport(name: str) -> Transport:
    """Imports the transport `name`, a key of `TRANSPORTS`."""
    return cast(Transport, importlib.import_module(TRANSPORTS[name].module))
