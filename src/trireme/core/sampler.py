"""What one room knows of another: the verbs, as Protocols. Only `trireme.launch.rl` sees the classes behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from trireme.core.types import SampledSequence, SampleRequest, WeightIdentity
from trireme.core.weights import PublishedWeights, UpdateReport


@dataclass(frozen=True)
class ReplicaStats:
    """What a replica has to do: sequences that it decodes, sequences that wait for a place, the share of its KV cache
    that is in use (0 to 1), and how often it gave up a sequence's KV for want of space since it started."""

    running: int
    waiting: int
    kv_used: float
    preemptions: int


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life. `pids`: process ids of an actor and of what it started, on the node with Ray's id `node`.
    `behind_s`: seconds for which a process behind it, which has work, has not answered it."""

    pids: tuple[int, ...]
    node: str
    behind_s: float = 0.0


class Sampler(Protocol):
    """The inference room as the orchestrator sees it: all replicas behind one router."""

    async def sample(self, request: SampleRequest) -> SampledSequence:
        """Samples one sequence on some replica. It goes on over weight updates; its spans say what came from which.

        Raises RoomFailed when no replica can finish it.
        """
        ...

    async def update_weights(self, weights: PublishedWeights) -> list[UpdateReport]:
        """Brings every live replica to `weights`, in flight. Raises WeightsRefused or RoomFailed."""
        ...

    async def adopt(self, identity: WeightIdentity) -> None:
        """All replicas have loaded the weights `identity` by themselves: instead of a first update. Raises
        RoomFailed."""
        ...

    def acknowledged(self) -> dict[int, int]:
        """Version that each live replica has acknowledged: {replica id: version}."""
        ...

    async def stats(self) -> dict[int, ReplicaStats]:
        """What each live replica has to do: {replica id: load}. Raises RoomFailed when no replica is left."""
        ...

    async def join(self, index: int, client: Any) -> None:
        """Replica `index`, which `client` calls, serves from now on. It takes the newest weights first, if any were
        published; never while an update is under way. Raises what it fails with."""
        ...

    def leave(self, index: int, reason: str) -> None:
        """Replica `index` is dead: what it was asked goes on elsewhere."""
        ...

    async def drain(self, index: int, timeout_s: float) -> None:
        """Replica `index` gets no new requests, and leaves once those in flight are finished, or after `timeout_s`
        seconds, when they go on elsewhere."""
        ...

    async def next_failure(self) -> tuple[int, str]:
        """Waits for the next replica that is found to have failed: its number and the reason. It is used no more."""
        ...
