"""One replica as those that call it see it, and the calls to it, which end when it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from inference.handover import Outcome, Progress
from trireme.core.errors import TriremeError, WeightsGone
from trireme.core.sampler import ReplicaStats
from trireme.core.transport import Offer
from trireme.core.types import SampleRequest, WeightIdentity
from trireme.core.weights import PublishedWeights, UpdateReport

Value = TypeVar("Value")


class ReplicaClient(Protocol):
    """One replica. Every call raises TriremeError when the replica fails it or is dead."""

    name: str

    def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        """Yields (index into `requests`, how it ended), each once. Requests that the replica gives up because it breaks
        end as Progress, before that is raised."""

    async def progress(self, lengths: Mapping[str, int]) -> Mapping[str, Progress]:
        """Returns {request id: what it has made beyond the number of tokens that is known}, for requests in flight that
        have made something."""

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        """Raises WeightsGone, and has changed nothing, when the bytes are nowhere any more."""

    async def offer(self, offer: Offer) -> None:
        """Returns when the replica is ready to receive what is offered. That it raises does not mean that it is
        broken."""

    async def adopt(self, identity: WeightIdentity) -> None: ...

    async def load_adapter(self, name: str, published: PublishedWeights) -> None:
        """Returns when requests may name the adapter."""

    async def drop_adapter(self, name: str) -> None: ...

    async def stats(self) -> ReplicaStats: ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests in flight; they end as Progress."""

    async def abort_all(self) -> None:
        """Ends the requests of all clients."""


class ReplicaCalls:
    """The calls to one replica. `fails` is told when one of them raises: the replica is used no more then."""

    def __init__(self, fails: Callable[[TriremeError], None]) -> None:
        self.failure: TriremeError | None = None
        """Why it is used no more."""
        self._fails = fails
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, task: asyncio.Task[Any]) -> None:
        """Ends a task when the replica is gone."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def call(self, work: Awaitable[Value]) -> Value:
        """Returns the answer of the replica. Raises why it is gone as soon as that is known, even if it never answers.
        All that it raises itself makes it gone but WeightsGone, for which it can do nothing."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        try:
            await asyncio.wait({task})
            if not task.cancelled():
                return task.result()
        except WeightsGone:
            raise
        except TriremeError as failure:
            self._fails(failure)
            raise
        finally:
            task.cancel()
            self._tasks.discard(task)
        assert self.failure is not None, "tasks are cancelled only when the replica is gone"
        raise self.failure

    def end(self, reason: TriremeError) -> None:
        """Ends all calls, and the tasks that belong to them."""
        self.failure = reason
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
