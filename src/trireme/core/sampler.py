"""The inference room as other rooms see it: its verbs as a Protocol, and the types of their results. Only
`trireme.launch` and `trireme.api` see the class behind it, `inference.router.Router`."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity
from trireme.core.weights import UpdateReport


@dataclass(frozen=True)
class ReplicaStats:
    """Numbers on how busy a replica is: sequences, KV cache, weights."""

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
    """Process ids of the actor and its children."""
    node: str
    """Ray's id of their node."""
    behind_s: float = 0.0
    """Seconds for which a process that the actor started, and that has work, has not answered, or made no progress."""
    limit_s: float = math.inf
    """After this time the actor kills it, and its heartbeat fails."""


class SampledPart(Protocol):
    """The T tokens of a sequence that were sampled so far, and the weights that sampled each part of them."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...

    @property
    def logprobs(self) -> npt.NDArray[np.float32]: ...

    @property
    def spans(self) -> tuple[VersionSpan, ...]: ...


OnProgress = Callable[[SampledPart], None]
Sample = Callable[..., Awaitable[SampledSequence]]
"""Samples a SampleRequest, as `Sampler.sample` does, and calls an OnProgress meanwhile, if it gets one too."""
OnVersions = Callable[[dict[int, int]], object]
"""Takes {replica: acknowledged version} of all live replicas."""


class Sampler(Protocol):
    """All replicas behind one router, as the orchestrator and the service see them. A sampler outlives replica sets: it
    samples with the replicas of one set, later with the replicas of the next."""

    async def sample(self, request: SampleRequest, on_progress: OnProgress | None = None, /) -> SampledSequence:
        """Samples one sequence for `request` on some replica. Continues through updates of weights; the result's spans
        say which weights sampled each token. Calls `on_progress` whenever there are more tokens. If the caller is
        cancelled, the replica stops.

        Raises RoomFailed if no replica can finish the sequence, BadRequest if no replica accepts the request.
        """

    def follow(self, source: Any) -> None:
        """Makes all requests from now on go to the replicas of another replica set. `source`: the object through which
        a router reads that replica set."""

    async def stats(self) -> dict[int, ReplicaStats]:
        """Returns {replica: utilisation}. A replica that does not answer is not used any more. Raises RoomFailed if
        none is left."""

    async def updated(self, identity: WeightIdentity) -> Sequence[UpdateReport]:
        """Waits until the update of the replicas to `identity` has ended. Returns each replica's report, or raises the
        update's error."""

    async def asleep(self) -> None:
        """Waits until all replicas sleep. In deterministic mode raises why a replica is gone."""


MakeSampler = Callable[[OnVersions], Sampler]
"""Makes a sampler that calls its argument whenever a replica joins, leaves, fails or acknowledges a version, and at the
end of an update, before `Sampler.updated` returns."""
