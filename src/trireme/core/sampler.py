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
    """Sequences that wait until the replica can decode them."""
    kv_used: float
    """Share of its KV cache that is in use, 0 to 1."""
    preemptions: int
    """How often the replica dropped the KV of a sequence for lack of space, since the replica started."""
    places: int | None = None
    """Sequences that the replica can decode at the same time; None: the replica does not report it."""
    weights: WeightIdentity | None = None
    """The weights of the replica; None: it has none yet, or does not report them."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of an actor."""

    pids: tuple[int, ...]
    """Process ids of the actor and its children."""
    node: str
    """Ray's id of the node of these processes."""
    behind_s: float = 0.0
    """Seconds for which a process that the actor has started, such as an engine, has not answered or made no progress,
    although it has work."""
    limit_s: float = math.inf
    """The limit of `behind_s`: after this many seconds the actor kills that process, and the actor's heartbeats
    fail."""


class SampledPart(Protocol):
    """The T tokens of a sequence that have been sampled so far, and the weights that sampled each part of the
    sequence."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...

    @property
    def logprobs(self) -> npt.NDArray[np.float32]: ...

    @property
    def spans(self) -> tuple[VersionSpan, ...]: ...


OnProgress = Callable[[SampledPart], None]
Sample = Callable[..., Awaitable[SampledSequence]]
"""A function that takes a SampleRequest, and an OnProgress if the caller has one. Samples a sequence as
`Sampler.sample` does."""
OnVersions = Callable[[dict[int, int]], object]
"""Takes {number of a replica: the version that it has acknowledged} of all live replicas."""


class Sampler(Protocol):
    """All replicas behind one router, as the orchestrator and the service see them. A sampler outlives replica sets: it
    samples with the replicas of one set, later with the replicas of the next."""

    async def sample(self, request: SampleRequest, on_progress: OnProgress | None = None, /) -> SampledSequence:
        """Samples one sequence for `request` on some replica. Sampling continues while the replica's weights are
        updated; the spans of the result say which weights sampled each token. Calls `on_progress` whenever there are
        more tokens. If the caller is cancelled, the replica stops sampling.

        Raises RoomFailed if no replica can finish the sequence, BadRequest if no replica accepts the request.
        """

    def follow(self, source: Any) -> None:
        """Sends all later requests to the replicas of another replica set (the replicas that one actor manages).
        `source`: the object through which a router reads that replica set."""

    async def stats(self) -> dict[int, ReplicaStats]:
        """Returns {number of a replica: its utilisation}. A replica that does not answer is no longer used. Raises
        RoomFailed if no replica is left."""

    async def updated(self, identity: WeightIdentity) -> Sequence[UpdateReport]:
        """Waits until the update of the replicas to `identity` has ended. Returns the report of each replica. If the
        update failed, raises its error."""


MakeSampler = Callable[[OnVersions], Sampler]
"""Takes an OnVersions, and returns a sampler. The sampler calls the OnVersions whenever a replica joins, leaves, fails
or acknowledges a version; it also does so at the end of an update, before `Sampler.updated` returns."""
