"""All replicas behind one sampler: where a request goes, and how an update reaches everyone.

A router lives in one event loop (the orchestrator's, or a user's own).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from trireme.errors import RoomFailed, TriremeError
from trireme.protocols import ReplicaLoad
from trireme.types import SampledSequence, SampleRequest
from trireme.weights import PublishedWeights, UpdateReport

ROUTES_KEPT = 65536


class ReplicaClient(Protocol):
    """One replica, as the router calls it. Every call raises TriremeError when the replica fails it or is dead."""

    name: str

    def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, SampledSequence | TriremeError]]:
        """Yields (index into `requests`, its sequence or its error) as each finishes."""
        ...

    async def update_weights(self, published: PublishedWeights) -> UpdateReport: ...

    async def load(self) -> ReplicaLoad: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...


Pending = tuple[SampleRequest, "asyncio.Future[SampledSequence]"]


class Router:
    """Implements `trireme.protocols.Sampler`.

    Requests of equal `route_key` stay on one replica (they share prefixes), others go where the fewest are in flight.
    With `fixed` (deterministic mode) routes are forgotten whenever nothing is in flight: requests that are then asked
    for in one turn of the event loop go where their own order says, whatever was asked before or in an earlier process.
    A replica that fails is used no more: its requests raise what it failed with, `acknowledged` leaves it out.
    """

    def __init__(self, replicas: Mapping[int, ReplicaClient], *, fixed: bool = False) -> None:
        self._replicas = dict(replicas)
        self._fixed = fixed
        self._failures: dict[int, TriremeError] = {}
        self._in_flight = dict.fromkeys(replicas, 0)
        self._routes: OrderedDict[str, int] = OrderedDict()
        self._acknowledged: dict[int, int] = {}
        self._queued: defaultdict[int, list[Pending]] = defaultdict(list)
        self._streams: set[asyncio.Task[None]] = set()

    def acknowledged(self) -> dict[int, int]:
        """Version that each live replica has acknowledged: {replica: version}. Empty before the first update."""
        return dict(self._acknowledged)

    async def load(self) -> dict[int, ReplicaLoad]:
        """What each live replica has to do: {replica: load}. One that can not say is used no more; raises RoomFailed
        when none is left."""
        found: dict[int, ReplicaLoad] = {}

        async def ask(replica: int) -> None:
            try:
                found[replica] = await self._replicas[replica].load()
            except TriremeError as failure:
                self._mark_failed(replica, failure)

        await asyncio.gather(*[ask(replica) for replica in self._live()])
        return {replica: found[replica] for replica in self._live()}

    # ------------------------------------------------------------------------------------------------------ sampling

    async def sample(self, request: SampleRequest) -> SampledSequence:
        """Samples one sequence. Cancelling the caller aborts it on its replica. Raises RoomFailed or WeightsRefused
        when its replica failed, or none is left."""
        replica = self._route(request.route_key)
        future: asyncio.Future[SampledSequence] = asyncio.get_running_loop().create_future()
        if not self._queued:  # requests of one turn of the event loop go out together
            asyncio.get_running_loop().call_soon(self._send_queued)
        self._queued[replica].append((request, future))
        self._in_flight[replica] += 1
        try:
            return await future
        except asyncio.CancelledError:
            self._spawn(self._abort(replica, request.request_id))
            raise
        finally:
            self._in_flight[replica] -= 1

    def _route(self, key: str) -> int:
        live = self._live()
        if self._fixed and not any(self._in_flight.values()):
            self._routes.clear()
        replica = self._routes.pop(key, None)
        if replica is None or replica in self._failures:
            replica = min(live, key=lambda candidate: self._in_flight[candidate])
        self._routes[key] = replica
        if len(self._routes) > ROUTES_KEPT:
            self._routes.popitem(last=False)
        return replica

    def _send_queued(self) -> None:
        queued, self._queued = self._queued, defaultdict(list)
        for replica, pending in queued.items():
            if waited_for := [(request, future) for request, future in pending if not future.done()]:
                self._spawn(self._stream(replica, waited_for))

    async def _stream(self, replica: int, pending: list[Pending]) -> None:
        """Sends one group of requests and hands out what comes back; leaves no future undone."""
        client = self._replicas[replica]
        ended: TriremeError = RoomFailed(f"{client.name} ended its answers before this one")
        try:
            async for index, outcome in client.sample([request for request, _ in pending]):
                settle(pending[index][1], outcome)
        except TriremeError as failure:
            ended = failure
            self._mark_failed(replica, failure)
        finally:
            for _, future in pending:
                settle(future, ended)

    async def _abort(self, replica: int, request_id: str) -> None:
        try:
            await self._replicas[replica].abort([request_id])
        except TriremeError as failure:
            self._mark_failed(replica, failure)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._streams.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._streams.discard)

    # ------------------------------------------------------------------------------------------------------- weights

    async def update_weights(self, weights: PublishedWeights) -> list[UpdateReport]:
        """Brings every live replica to `weights`, all at once. When one fails, the others still finish; then the
        first failure is raised (RoomFailed or WeightsRefused)."""
        live = [replica for replica in self._replicas if replica not in self._failures]
        results = await asyncio.gather(
            *(self._update_one(replica, weights) for replica in live), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, UpdateReport)]

    async def _update_one(self, replica: int, weights: PublishedWeights) -> UpdateReport:
        try:
            report = await self._replicas[replica].update_weights(weights)
        except TriremeError as failure:
            self._mark_failed(replica, failure)
            raise
        self._acknowledged[replica] = weights.identity.version
        return report

    def _live(self) -> list[int]:
        live = [replica for replica in self._replicas if replica not in self._failures]
        if not live:
            reasons = "; ".join(str(failure) for failure in self._failures.values())
            raise RoomFailed(f"no inference replica is left: {reasons}")
        return live

    def _mark_failed(self, replica: int, failure: TriremeError) -> None:
        self._failures.setdefault(replica, failure)
        self._acknowledged.pop(replica, None)


def settle(future: asyncio.Future[SampledSequence], outcome: SampledSequence | TriremeError) -> None:
    """Gives `future` its result or error, unless its caller was cancelled or it has one already."""
    if future.done():
        return
    if isinstance(outcome, TriremeError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
