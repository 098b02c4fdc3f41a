"""All replicas behind one sampler: where a request goes, and how an update reaches everyone.

A router lives in one event loop (the orchestrator's, or a user's own).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from trireme.errors import ProvenanceError, RoomFailed, TriremeError
from trireme.protocols import ReplicaLoad
from trireme.types import SampledSequence, SampleRequest, WeightIdentity
from trireme.weights import PublishedWeights, UpdateReport

ROUTES_KEPT = 65536
NAMED = 4
log = logging.getLogger(__name__)


class ReplicaClient(Protocol):
    """One replica, as the router calls it. Every call raises TriremeError when the replica fails it or is dead."""

    name: str

    def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, SampledSequence | TriremeError]]:
        """Yields (index into `requests`, its sequence or its error) as each finishes."""
        ...

    async def update_weights(self, published: PublishedWeights) -> UpdateReport: ...

    async def adopt(self, identity: WeightIdentity) -> None: ...

    async def load(self) -> ReplicaLoad: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...


Pending = tuple[SampleRequest, "asyncio.Future[SampledSequence]"]


class Router:
    """Implements `trireme.protocols.Sampler`.

    Requests of equal `route_key` stay on one replica (they share prefixes), even while it takes weights: their turn
    there comes sooner than a prefix is computed elsewhere. Others go to a replica that is not taking weights, if there
    is one, and among those where the fewest are in flight.
    With `fixed` (deterministic mode) routes are forgotten whenever nothing is in flight: requests that are then asked
    for in one turn of the event loop go where their own order says, whatever was asked before or in an earlier process.
    A replica that fails is used no more: its requests raise what it failed with, `acknowledged` leaves it out. One that
    names weights which it was never given is used no more either, but what was asked of it is asked of another.
    At most `max_updating` replicas take weights at the same time (None: all).
    """

    def __init__(
        self, replicas: Mapping[int, ReplicaClient], *, fixed: bool = False, max_updating: int | None = None
    ) -> None:
        self._replicas = dict(replicas)
        self._fixed = fixed
        self._max_updating = max_updating or len(self._replicas)
        self._updating: set[int] = set()
        self._given: dict[int, list[WeightIdentity]] = {replica: [] for replica in replicas}
        self._failures: dict[int, TriremeError] = {}
        self._asked: dict[int, dict[asyncio.Future[SampledSequence], str]] = {replica: {} for replica in replicas}
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
        while True:
            replica = self._route(request.route_key)
            try:
                return await self._sample_on(replica, request)
            except ProvenanceError:  # that replica is out
                continue  # another one samples the request, whole

    async def _sample_on(self, replica: int, request: SampleRequest) -> SampledSequence:
        future: asyncio.Future[SampledSequence] = asyncio.get_running_loop().create_future()
        if not self._queued:  # requests of one turn of the event loop go out together
            asyncio.get_running_loop().call_soon(self._send_queued)
        self._queued[replica].append((request, future))
        self._asked[replica][future] = request.request_id
        try:
            return await future
        except asyncio.CancelledError:
            self._spawn(self._abort(replica, [request.request_id]))
            raise
        finally:
            del self._asked[replica][future]

    def _route(self, key: str) -> int:
        if self._fixed and not any(self._asked.values()):
            self._routes.clear()
        replica = self._routes.pop(key, None)
        if replica is None or replica in self._failures:
            live = self._live()
            free = [candidate for candidate in live if candidate not in self._updating]
            replica = min(free or live, key=lambda candidate: len(self._asked[candidate]))
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
                if isinstance(outcome, SampledSequence):
                    self._check_given(replica, "sampled tokens from", [span.identity for span in outcome.spans])
                settle(pending[index][1], outcome)
        except TriremeError as failure:
            ended = failure
            self._mark_failed(replica, failure)
        finally:
            for _, future in pending:
                settle(future, ended)

    async def _abort(self, replica: int, request_ids: Sequence[str]) -> None:
        try:
            await self._replicas[replica].abort(request_ids)
        except TriremeError as failure:
            self._mark_failed(replica, failure)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._streams.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._streams.discard)

    # ------------------------------------------------------------------------------------------------------- weights

    async def update_weights(self, weights: PublishedWeights) -> list[UpdateReport]:
        """Brings every live replica to `weights`. When one fails, the others still finish; then the first failure is
        raised (RoomFailed or WeightsRefused). One that reports other weights than these is left out."""
        turns = asyncio.Semaphore(self._max_updating)
        results = await asyncio.gather(
            *(self._update_one(replica, weights, turns) for replica in self._live()), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ProvenanceError):
                raise result
        self._live()
        return [result for result in results if isinstance(result, UpdateReport)]

    async def adopt(self, identity: WeightIdentity) -> None:
        """Instead of a first update: all replicas have loaded the weights `identity` themselves. Raises RoomFailed."""
        await asyncio.gather(*(self._replicas[replica].adopt(identity) for replica in self._live()))
        for replica in self._live():
            self._given[replica].append(identity)
            self._acknowledged[replica] = identity.version

    async def _update_one(self, replica: int, weights: PublishedWeights, turns: asyncio.Semaphore) -> UpdateReport:
        async with turns:
            self._raise_if_failed(replica)  # while it waited
            self._updating.add(replica)
            self._given[replica].append(weights.identity)
            try:
                report = await self._replicas[replica].update_weights(weights)
                self._check_given(replica, "reports that it has", [report.identity], [weights.identity])
            except TriremeError as failure:
                self._mark_failed(replica, failure)
                raise
            finally:
                self._updating.discard(replica)
        self._raise_if_failed(replica)
        self._acknowledged[replica] = weights.identity.version
        return report

    def _raise_if_failed(self, replica: int) -> None:
        if replica in self._failures:
            raise self._failures[replica]

    def _check_given(
        self,
        replica: int,
        says: str,
        identities: Sequence[WeightIdentity],
        expected: Sequence[WeightIdentity] | None = None,
    ) -> None:
        """Raises ProvenanceError unless all `identities` are among those that `replica` was given."""
        given = self._given[replica] if expected is None else expected
        strange = [identity for identity in identities if identity not in reversed(given)]  # it will be a late one
        if not strange:
            return
        raise ProvenanceError(
            f"{self._replicas[replica].name} {says} weights {', '.join(map(str, strange))} (attempt:version:digest); "
            f"it was given {', '.join(map(str, given[-NAMED:])) or 'none'}"
        )

    def _live(self) -> list[int]:
        live = [replica for replica in self._replicas if replica not in self._failures]
        if not live:
            reasons = "; ".join(str(failure) for failure in self._failures.values())
            raise RoomFailed(f"no inference replica is left: {reasons}")
        return live

    def _mark_failed(self, replica: int, failure: TriremeError) -> None:
        """Uses `replica` no more. Nothing that it still answers counts if it named weights that it was not given."""
        if replica in self._failures:
            return
        self._failures[replica] = failure
        self._acknowledged.pop(replica, None)
        if isinstance(failure, ProvenanceError):
            log.error("%s. It is used no more; other replicas sample what was asked of it.", failure)
            asked = dict(self._asked[replica])
            for future in asked:
                settle(future, failure)
            self._spawn(self._abort(replica, list(asked.values())))


def settle(future: asyncio.Future[SampledSequence], outcome: SampledSequence | TriremeError) -> None:
    """Gives `future` its result or error, unless its caller was cancelled or it has one already."""
    if future.done():
        return
    if isinstance(outcome, TriremeError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
