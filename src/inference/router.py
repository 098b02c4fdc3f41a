"""All replicas behind one sampler: where a request goes, what becomes of it when its replica is lost, and how weights
reach everyone.

A router lives in one event loop (the orchestrator's, or a user's own).
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from inference.handover import Kept, Outcome, Progress
from inference.members import Asked, Fleet, Member, Moved, ReplicaClient
from trireme.core.errors import RoomFailed, TriremeError, WeightsRefused
from trireme.core.sampler import ReplicaStats
from trireme.core.types import SampledSequence, SampleRequest, WeightIdentity
from trireme.core.weights import PublishedWeights, UpdateReport

ROUTES_KEPT = 65536
PROGRESS_S = 1.0
HAND_OVER_S = 5.0


class Router:
    """Implements `trireme.core.sampler.Sampler`.

    Requests of equal `route_key` stay on one replica (they share prefixes), even while it takes weights: their turn
    there comes sooner than a prefix is computed elsewhere. Others go to a replica that is not taking weights, if there
    is one, and among those where the fewest are in flight.

    A replica that fails is used no more: `acknowledged` leaves it out, `next_failure` tells of it, and what it was
    asked goes on elsewhere from the tokens that it had (`inference.handover`). With `one_version` it is sampled again
    whole: no sequence may have tokens of two versions. When none is left, requests and updates wait for `patience_s`
    seconds until one joins.

    With `fixed` (deterministic mode) a lost replica's failure is raised instead, and routes are forgotten whenever
    nothing is in flight: requests that are then asked for in one turn of the event loop go where their own order says,
    whatever was asked before or in an earlier process.

    A replica whose answers make no sense, one after the other, has failed too: tokens that are none of the model's
    `vocab_size` (None: not known), log-probabilities that are not finite.

    At most `max_updating` replicas take weights at the same time (None: all).
    """

    def __init__(
        self,
        replicas: Mapping[int, ReplicaClient],
        *,
        fixed: bool = False,
        max_updating: int | None = None,
        one_version: bool = False,
        patience_s: float = 0.0,
        vocab_size: int | None = None,
    ) -> None:
        self._fleet = Fleet(replicas, patience_s)
        self._fixed, self._max_updating, self._one_version = fixed, max_updating, one_version
        self._vocab_size = vocab_size
        self._routes: OrderedDict[str, Member] = OrderedDict()
        self._queued: defaultdict[Member, list[Asked]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._name, self._numbers = uuid.uuid4().hex[:6], itertools.count()
        self._changing = asyncio.Lock()  # weights, and who is to have them
        self._newest: PublishedWeights | None = None
        self._loaded: WeightIdentity | None = None
        self._joining: Member | None = None

    def acknowledged(self) -> dict[int, int]:
        """Version that each live replica has acknowledged: {replica: version}. Empty before the first update."""
        return {m.index: m.acknowledged for m in self._fleet.live if m.acknowledged is not None}

    async def stats(self) -> dict[int, ReplicaStats]:
        """What each live replica has to do: {replica: load}. One that can not say is used no more; raises RoomFailed
        when none is left."""
        while True:
            asked = await self._fleet.someone()
            loads = await asyncio.gather(
                *(self._fleet.call(m, m.client.stats()) for m in asked), return_exceptions=True
            )
            found = {m.index: load for m, load in zip(asked, loads, strict=True) if isinstance(load, ReplicaStats)}
            if found:
                return found

    # ------------------------------------------------------------------------------------------------------ sampling

    async def sample(self, request: SampleRequest) -> SampledSequence:
        """Samples one sequence. Cancelling the caller aborts it on its replica. Raises RoomFailed or WeightsRefused
        when no replica is left, and RoomFailed when no replica can sample it."""
        kept = Kept(request)
        while True:
            if not self._fleet.serves:
                await self._fleet.someone()
            try:
                return kept.joined(await self._sample_on(self._route(request.route_key), kept))
            except Moved as moved:
                if self._fixed:
                    raise moved.reason from None
                if self._one_version:
                    kept.forget_all()

    async def _sample_on(self, member: Member, kept: Kept) -> SampledSequence:
        """Raises Moved, and what the replica says of the request itself."""
        asked = Asked(self._on_the_wire(kept.begin()), kept, asyncio.get_running_loop().create_future())
        name = asked.request.request_id
        if not self._queued:  # requests of one turn of the event loop go out together
            asyncio.get_running_loop().call_soon(self._send_queued)
        self._queued[member].append(asked)
        member.asked[name] = asked
        try:
            return await asked.future
        except asyncio.CancelledError:
            self._spawn(self._abort(member, [name]))
            raise
        finally:
            del member.asked[name]

    def _on_the_wire(self, asked: SampleRequest) -> SampleRequest:
        """Under a name of its own: what a replica has may be asked for again, of it or by another process."""
        name = f"{asked.request_id}@{self._name}-{next(self._numbers)}"
        named = object.__new__(SampleRequest)  # `replace` takes eight times as long
        vars(named).update(vars(asked), request_id=name)
        return named

    def _route(self, key: str) -> Member:
        if self._fixed and not any(member.asked for member in self._fleet.live):
            self._routes.clear()
        member = self._routes.pop(key, None)
        if member is None or member.gone or member.draining:
            serving = self._fleet.serving
            free = [candidate for candidate in serving if not candidate.updating]
            member = min(free or serving, key=lambda candidate: len(candidate.asked))
        self._routes[key] = member
        if len(self._routes) > ROUTES_KEPT:
            self._routes.popitem(last=False)
        return member

    def _send_queued(self) -> None:
        queued, self._queued = self._queued, defaultdict(list)
        for member, all_asked in queued.items():
            if waited_for := [asked for asked in all_asked if not asked.future.done()]:
                self._spawn(self._stream(member, waited_for), member)
                if not member.followed and not self._fixed:
                    self._spawn(self._follow(member), member)

    async def _stream(self, member: Member, all_asked: list[Asked]) -> None:
        """Sends one group of requests and hands out what comes back; leaves none of them with this replica."""
        silent = set(all_asked)
        try:
            async for index, outcome in member.client.sample([asked.request for asked in all_asked]):
                self._take(member, all_asked[index], outcome)
                silent.discard(all_asked[index])
            if any(not asked.future.done() for asked in silent):
                raise RoomFailed(f"{member.name} ended its answers before this one")
        except TriremeError as failure:
            self._fleet.fail(member, failure)
        for asked in all_asked:
            if not asked.future.done():
                asked.settle(Moved(RoomFailed(f"{member.name} gave up request {asked.request.request_id}")))

    def _take(self, member: Member, asked: Asked, outcome: Outcome) -> None:
        """Raises ProvenanceError when the replica names weights that it was not given, RoomFailed when nothing that it
        answers makes sense. A single answer that makes none is for whoever asked."""
        sense = True
        if isinstance(outcome, SampledSequence | Progress):
            member.check_given("sampled tokens from", [span.identity for span in outcome.spans])
            sense = member.makes_sense(outcome, self._vocab_size)
        if not isinstance(outcome, Progress):
            asked.settle(outcome)
        elif sense:
            asked.kept.add(outcome)

    async def _follow(self, member: Member) -> None:
        """Keeps what `member` has made of its requests, as long as it has any."""
        member.followed = True
        try:
            await asyncio.sleep(PROGRESS_S)
            while member.asked:
                known = {name: asked.kept.known for name, asked in member.asked.items()}
                for name, progress in (await self._fleet.call(member, member.client.progress(known))).items():
                    if asked := member.asked.get(name):
                        self._take(member, asked, progress)
                await asyncio.sleep(PROGRESS_S)
        except TriremeError as failure:
            self._fleet.fail(member, failure)
        finally:
            member.followed = False

    async def _abort(self, member: Member, request_ids: Sequence[str]) -> None:
        with suppress(TriremeError):  # its end is known, and ends them all
            await self._fleet.call(member, member.client.abort(request_ids))

    def _spawn(self, coroutine: Coroutine[Any, Any, None], member: Member | None = None) -> None:
        """Begins work; that of a member ends when the member is gone."""
        task = asyncio.get_running_loop().create_task(coroutine)
        for tasks in (self._tasks, *([member.tasks] if member else [])):  # the loop itself keeps only weak references
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    # ------------------------------------------------------------------------------------------------------- weights

    async def update_weights(self, weights: PublishedWeights) -> list[UpdateReport]:
        """Brings every live replica to `weights`. One that fails is left out, and the others finish; then, with
        `fixed`, its failure is raised. When none is left, waits for one that joins, and takes these weights first.
        Raises RoomFailed, or WeightsRefused when every replica refuses them."""
        async with self._changing:
            self._newest = weights
            turns = asyncio.Semaphore(self._max_updating or len(self._fleet.members) or 1)
            results = await asyncio.gather(
                *(self._update_one(member, weights, turns) for member in self._fleet.live), return_exceptions=True
            )
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures and (self._fixed or all(isinstance(failure, WeightsRefused) for failure in results)):
            raise failures[0]
        for failure in failures:
            if not isinstance(failure, TriremeError):
                raise failure
        reports = [result for result in results if isinstance(result, UpdateReport)]
        return reports or [member.report for member in await self._fleet.someone() if member.report]

    async def adopt(self, identity: WeightIdentity) -> None:
        """Instead of a first update: all replicas have loaded the weights `identity` themselves. Raises RoomFailed."""
        self._loaded = identity
        await asyncio.gather(*(self._adopt_one(member, identity) for member in self._fleet.live))

    async def _adopt_one(self, member: Member, identity: WeightIdentity) -> None:
        await self._fleet.call(member, member.client.adopt(identity))
        member.given.append(identity)
        member.acknowledged = identity.version

    async def _update_one(self, member: Member, weights: PublishedWeights, turns: asyncio.Semaphore) -> UpdateReport:
        async with turns:
            if member.gone:  # while it waited
                raise member.gone
            member.updating = True
            member.given.append(weights.identity)
            try:
                member.report = await self._fleet.call(member, self._checked_update(member, weights))
            finally:
                member.updating = False
        member.acknowledged = weights.identity.version
        return member.report

    async def _checked_update(self, member: Member, weights: PublishedWeights) -> UpdateReport:
        report = await member.client.update_weights(weights)
        member.check_given("reports that it has", [report.identity], [weights.identity])
        return report

    # ------------------------------------------------------------------------------------------------------- members

    async def join(self, index: int, client: ReplicaClient) -> None:
        """Replica `index` serves from now on: a new one, or the successor of one that is gone. It takes the newest
        weights first, if any were published; never while an update is under way. Raises what it fails with."""
        async with self._changing:
            self.leave(index, f"{client.name} has a successor")
            joiner = self._joining = Member(index, client)
            try:
                if self._newest:
                    await self._update_one(joiner, self._newest, asyncio.Semaphore())
                elif self._loaded:
                    await self._adopt_one(joiner, self._loaded)
            finally:
                self._joining = None
            self._fleet.add(joiner)

    def leave(self, index: int, reason: str) -> None:
        """Replica `index` is dead, says who watches it: one that hangs raises nothing by itself. `next_failure` does
        not tell of it."""
        for member in (self._fleet.members.get(index), self._joining):
            if member and member.index == index:
                self._fleet.dismiss(member, RoomFailed(reason))

    async def drain(self, index: int, timeout_s: float) -> None:
        """Replica `index` gets no new requests and leaves: as soon as those in flight are finished, or after
        `timeout_s` seconds, when they go on elsewhere with what they have."""
        if (member := self._fleet.members.get(index)) is None:
            return
        member.draining = True
        await self._without_requests(member, timeout_s)
        if member.asked:
            self._spawn(self._abort(member, list(member.asked)))
            await self._without_requests(member, HAND_OVER_S)
        self._fleet.dismiss(member, RoomFailed(f"{member.name} was drained"))

    async def _without_requests(self, member: Member, timeout_s: float) -> None:
        """Returns when nothing that `member` has now is asked of it any more, or after `timeout_s` seconds."""
        if futures := [asked.future for asked in member.asked.values()]:
            await asyncio.wait(futures, timeout=timeout_s)

    async def next_failure(self) -> tuple[int, str]:
        """Waits for the next replica that this router finds to have failed: its index and the reason."""
        return await self._fleet.next_failure()
