"""The seam between *what* is published (`trireme.core.weights.WeightsManifest`) and *how* it travels: the transports.

    trainer shards --Sender.send(units)--> entries, source --Receiver.open(source)--> buckets of bytes

The entries become part of the manifest. The source belongs to the transport: small, picklable, opaque to all others.
Replicas open it, commits too (they write files from the bytes). Whatever the transport, a receiver checks the digest of
the bytes, and each replica's canary proves their use. A new transport is a module in `trireme.transports` and a line in
`TRANSPORTS`.

The interface is provisional until the next transports are built. How they fit:

*A group whose members change* (broadcast). A source names a session: attempt, epoch, members, and the layout of the
buckets. The router raises the epoch when a replica joins, leaves or fails. `send` makes the offer; `open` says ready,
then receives. Members that do not answer by the deadline are dismissed before the broadcast, in which a dead member
would block the others; after it, what a member lacks is its own failure and its replica is replaced. Every rank of the
trainer calls `send`, so rank r of R can serve the replicas i with i mod R = r. A replica that is no member of the
session, and a commit, open the same source: it also says where to get the buckets from host memory on demand.

*Tensor-parallel receivers.* Each rank of an engine opens the source with a receiver of its own and gets whole tensors,
of which vLLM's loaders keep that rank's part. The bytes of one node need to arrive there once: ranks share them through
the object store, a memory file or a broadcast in the node. The digest covers whole tensors, so any rank can check it.

*A delta* is an encoding on any source: its entries hold indices and values, and the manifest names its base, an
identity that the receiver must hold; else the receiver asks for the dense form.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from trireme.core.weights import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

TRANSPORTS = {"object_store": "trireme.transports.object_store"}
"""Modules that implement `Transport`, by the name that `inference.transport` chooses; imported when used."""


class Sender(Protocol):
    """One end of a transport, in each shard of the trainer."""

    def send(self, units: Iterable[Sequence[tuple[str, Tensor]]]) -> tuple[tuple[TensorEntry, ...], Any]:
        """Sends the named tensors of one version; returns their table and the source. Collective: every rank calls it,
        and takes each unit once, in turn, because gathering a unit is collective too. Ranks other than 0 may return an
        empty table and None."""


class Receiver(Protocol):
    """The other end, in a replica or where a commit is written."""

    async def open(self, source: Any) -> Sequence[npt.NDArray[np.uint8]]:
        """Returns the buckets, uint8 arrays that may be read-only, when all their bytes are here. Raises when they
        cannot be had, for example because the sender is dead."""


class Transport(Protocol):
    """A module that makes both ends."""

    def make_sender(self, rank: int) -> Sender: ...

    def make_receiver(self) -> Receiver: ...


def load_transport(name: str) -> Transport:
    """Imports the transport `name`, a key of `TRANSPORTS`."""
    return cast(Transport, importlib.import_module(TRANSPORTS[name]))
