"""The inference room as other rooms see it: its verbs as a Protocol, and what they return. Only `trireme.launch` and
`trireme.api` see the classes behind it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trireme.core.transport import Offer, Session
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity
from trireme.core.weights import PublishedWeights, UpdateReport


@dataclass(frozen=True)
class ReplicaStats:
    """A replica's utilisation."""

    running: int
    """Sequences that it decodes."""
    waiting: int
    """Sequences that wait for a place."""
    kv_used: float
    """Share of its KV cache that is in use, 0 to 1."""
    preemptions: int
    """How often it dropped a sequence's KV for lack of space since it started."""
    places: int | None = None
    """Sequences that it can decode at the same time; None: it does not say."""
    weights: WeightIdentity | None = None
    """Its weights; None: it has none yet, or does not say."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of an actor."""

    pids: tuple[int, ...]
    """Process ids of the actor and of those that it started."""
    node: str
    """Ray's id of their node."""
    behind_s: float = 0.0
    """Seconds for which a process that the actor started, and that has work, has not answered, or made no progress."""
    limit_s: float = math.inf
    """After so many the actor kills it, and its heartbeat fails."""


class SampledPart(Protocol):
    """All that a replica has sampled of a sequence so far."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...

    @property
    def logprobs(self) -> npt.NDArray[np.float32]: ...

    @property
    def spans(self) -> tuple[VersionSpan, ...]: ...


OnProgress = Callable[[SampledPart], None]


class SequenceSampler(Protocol):
    """Anything that samples sequences: the replicas, or what stands before them."""

    async def sample(self, request: SampleRequest, on_progress: OnProgress | None = None, /) -> SampledSequence:
        """Samples one sequence on some replica. It continues over weight updates; its spans name the weights of each
        token. Calls `on_progress` whenever there is more of it. Cancelling the caller aborts it.

        Raises RoomFailed when no replica can finish it, BadRequest when none samples it.
        """


class Sampler(SequenceSampler, Protocol):
    """The inference room as other rooms see it: all replicas behind one router."""

    async def offer(self, offer: Offer) -> Session:
        """Asks the replicas to receive a version while the trainer sends it. Returns those that are ready, maybe none,
        after at most `offer.ready_s` seconds. Others fetch the version when they are to take it."""

    async def update_weights(self, weights: PublishedWeights) -> list[UpdateReport]:
        """Brings every live replica to `weights` while it samples. Raises WeightsRefused or RoomFailed, as
        WeightsGone when no replica can have the bytes any more: newer ones may be brought then."""

    async def adopt(self, identity: WeightIdentity) -> None:
        """Labels the weights that the replicas loaded from disk as `identity`, in place of a first update. Raises
        RoomFailed."""

    def acknowledged(self) -> dict[int, int]:
        """Returns {replica: version} for live replicas that have acknowledged one; empty before the first update."""

    async def stats(self) -> dict[int, ReplicaStats]:
        """Returns {replica: utilisation}. A replica that cannot answer is used no more; raises RoomFailed when none is
        left."""

    async def join(self, index: int, client: Any) -> None:
        """Adds replica `index`, new or in place of a lost one; `client` calls it. It takes the newest weights first, if
        any were published, beside updates, which do not wait for it; where their bytes are gone, it takes those of the
        next update. Raises its failure."""

    def leave(self, index: int, reason: str) -> None:
        """Removes replica `index`, which is dead; other replicas finish its requests."""

    async def drain(self, index: int, timeout_s: float) -> None:
        """Gives replica `index` no new requests, and removes it when those in flight are finished, or after `timeout_s`
        seconds, when other replicas finish them from what they have; and when no weights are being sent to it."""

    async def next_failure(self) -> tuple[int, str]:
        """Waits for the next replica that this sampler finds to have failed; returns its number and the reason. It is
        used no more."""


class AdapterSampler(Sampler, Protocol):
    """A sampler whose replicas hold adapters beside the weights of updates."""

    async def load_adapter(self, name: str, weights: PublishedWeights) -> None:
        """Brings an adapter to every replica, for requests that name it. Raises WeightsRefused or RoomFailed."""

    async def drop_adapter(self, name: str) -> None:
        """Has every replica forget an adapter, which no request in flight may name."""
