"""One replica as its callers see it, and the calls to one replica, which all end when it is given up."""

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
    """The calls to one replica. Each raises TriremeError when the replica fails it or is dead."""

    name: str

    def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        """Yields (index into `requests`, outcome), once for each. If the replica breaks, its requests end as Progress,
        and then the reason is raised."""

    async def progress(self, lengths: Mapping[str, int]) -> Mapping[str, Progress]:
        """Returns {request id: its new tokens} for the requests in flight that have some. `lengths`: {request id: the
        number of its tokens that the caller already has}."""

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        """Loads `published` and returns a report. Raises WeightsGone, with nothing changed, when the bytes are nowhere
        any more."""

    async def offer(self, offer: Offer) -> None:
        """Returns when the replica is ready to receive the offered version. An error here does not mean that the
        replica is broken."""

    async def adopt(self, identity: WeightIdentity) -> None: ...

    async def load_adapter(self, name: str, published: PublishedWeights) -> None:
        """Loads an adapter; on return requests may name it."""

    async def drop_adapter(self, name: str) -> None: ...

    async def stats(self) -> ReplicaStats: ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests if they are in flight; they end as Progress."""

    async def abort_all(self) -> None:
        """Ends all requests on the replica, of all callers."""


class ReplicaCalls:
    """Makes the calls to one replica, until one raises: then calls `fails` with its error, and the replica is given
    up."""

    def __init__(self, fails: Callable[[TriremeError], None]) -> None:
        self.failure: TriremeError | None = None
        """Why it is used no more."""
        self._fails = fails
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, task: asyncio.Task[Any]) -> None:
        """Sees that `task` is cancelled when the replica is given up."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def call(self, work: Awaitable[Value]) -> Value:
        """Waits for `work`, a call to the replica, and returns its value. If the replica is given up meanwhile, raises
        the reason at once. An error of `work` itself is raised and gives the replica up; WeightsGone is only raised,
        because the replica is not to blame."""
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
        """Gives the replica up for `reason`: cancels all its calls and tasks."""
        self.failure = reason
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
