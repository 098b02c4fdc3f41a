"""Weights travel by broadcasts where these work, else through Ray's object store.

Where a broadcast may be used (`trireme.plan.transport`), it is tried once: with the first version for which
replicas are ready. If it does not reach all of them, no more is broadcast. A version without a session goes through the
object store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trireme.core.transport import Receiver, Sender, Session, Transport
from trireme.transports import broadcast, object_store

if TYPE_CHECKING:
    from torch import Tensor

    from trireme.core.weights import Layout

log = logging.getLogger(__name__)


class AutoReceiver:
    """Implements `trireme.core.transport.Receiver`: opens the source of either transport."""

    async def open(self, source: Any) -> Sequence[npt.NDArray[np.uint8]]:
        return await _of(source).make_receiver().open(source)


class AutoSender:
    """Implements `trireme.core.transport.Sender`, by the senders of both transports."""

    def __init__(self, rank: int, size: int, ports: Sequence[int]) -> None:
        self._to_members = broadcast.make_sender(rank, size, ports)
        self._to_store = object_store.make_sender(rank, size, ports)
        self.endpoint = self._to_members.endpoint

    @property
    def kept(self) -> Any:
        """The rank's share of versions that were broadcast."""
        return self._to_members.kept  # type: ignore[attr-defined]  # of `sending.BroadcastSender`

    def send(
        self, version: int, layout: Layout, units: Iterable[Sequence[tuple[str, Tensor]]], session: Session | None
    ) -> Any:
        sender = self._to_members if session else self._to_store
        return sender.send(version, layout, units, session)


class Trial:
    """Finds out with the first version that is sent to replicas whether more are broadcast."""

    def __init__(self) -> None:
        self.failed = False
        """True: no more is broadcast."""
        self._passed = False

    def note(self, parts_R: Sequence[Any]) -> None:
        """Takes note of how the ranks have sent a version."""
        sent = [part for part in parts_R if isinstance(part, broadcast.KeptPart)]
        if not sent or self._passed:
            return
        failures = [part.failure for part in sent if part.failure]
        self.failed, self._passed = bool(failures), not failures
        if failures:
            log.warning(
                "weights travel through Ray's object store from now on (inference.transport = auto), as the first "
                "broadcast failed: %s",
                "; ".join(failures),
            )
        else:
            log.info("weights are broadcast (inference.transport = auto): the first version has arrived so")


def make_sender(rank: int, size: int, ports: Sequence[int] = ()) -> Sender:
    return AutoSender(rank, size, ports)


def make_receiver() -> Receiver:
    return AutoReceiver()


def join(parts_R: Sequence[Any]) -> Any:
    return (broadcast if isinstance(parts_R[0], broadcast.KeptPart) else object_store).join(parts_R)


def lease(source: Any) -> None:
    _of(source).lease(source)


def release(source: Any) -> None:
    _of(source).release(source)


def _of(source: Any) -> Transport:
    """Returns the transport of a source."""
    return broadcast if isinstance(source, broadcast.Source) else object_store
