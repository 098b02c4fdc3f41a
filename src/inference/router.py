"""All replicas behind one sampler: routes requests, hands over those of a lost replica, updates weights everywhere.

A router lives in one event loop (the orchestrator's, or a user's own).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from inference.handover import Handover, Outcome, Progress
from inference.members import HandoverNeeded, Member, Members, ReplicaClient, RoutedRequest
from inference.offers import Offers
from trireme.core.deadline import LearnedDeadline
from trireme.core.errors import BadRequest, RoomFailed, TriremeError, WeightsGone, WeightsRefused
from trireme.core.sampler import ReplicaStats
from trireme.core.transport import Offer, Session
from trireme.core.types import SampledSequence, SampleRequest, WeightIdentity
from trireme.core.weights import Drift, PublishedWeights, UpdateReport

ROUTES_KEPT = 65536
MOST_LOSSES = 2
"""A request that was in flight on so many replicas when they were lost is given to no other one."""
PROGRESS_S = 1.0
HAND_OVER_S = 5.0
ROUNDS = 2
"""When a member that catches up has begun to take weights so often, the next update waits for it: else updates that
follow each other closely would keep it out for ever."""
log = logging.getLogger(__name__)


class Router:
    """Implements `trireme.core.sampler.AdapterSampler`.

    Requests of equal `route_key` stay on one replica (they share prefixes), even while it takes weights: their turn
    there comes sooner than a prefix is computed elsewhere. Others go to a replica that is not taking weights, if there
    is one, and among those where the fewest are in flight.

    A replica that fails is used no more: `acknowledged` leaves it out, `next_failure` reports it, and another replica
    finishes its requests from the tokens that they have (`inference.handover`), but for those that had a replica that
    was lost before. When none is left, requests and updates wait for one to join.

    Weights. An update waits for the members that serve, each for ten times as long as the slowest update so far
    (`LearnedDeadline`). One that takes longer is left behind like one that joins: nothing waits for it, it gets no
    requests, and it serves (again) once it has the newest weights, however many versions that takes. The watcher of the
    processes finds out if it is dead. A member that finds the bytes of a version gone takes a newer one; if there is
    none yet, it is left behind until the next update, which waits for it.

    In deterministic mode routes are forgotten whenever nothing is in flight: requests that are then made in one turn of
    the event loop go where their own order says, whatever came before or in an earlier process.
    """

    def __init__(
        self,
        replicas: Mapping[int, ReplicaClient],
        *,
        fixed: bool = False,
        one_version: bool = False,
        patience_s: float = 0.0,
        update_s: float = math.inf,
        vocab_size: int | None = None,
        progress_s: float | None = None,
        updates: bool = True,
    ) -> None:
        """`fixed`: deterministic mode; a lost replica's failure is raised.
        `one_version`: no sequence has tokens of two versions; a lost one is sampled again from its prompt.
        `patience_s`: how long to wait for a replica to join when none is left.
        `update_s`: the longest that an update waits for a replica; `client` has a deadline of its own.
        `vocab_size`: of the model (None: not known). A replica whose answers have other tokens, or log-probabilities
        that are not finite, several times in a row, has failed.
        `progress_s`: seconds between two questions what requests have whose answers are read (None: PROGRESS_S).
        `updates`: False: another router brings weights to the replicas, which may name any.
        """
        self._members = Members(replicas, patience_s)
        self._offers = Offers(self._members)
        self._fixed, self._one_version = fixed, one_version
        self._vocab_size, self._progress_s, self._updates = vocab_size, progress_s, updates
        self._routes: OrderedDict[str, Member] = OrderedDict()
        self._queued: defaultdict[Member, list[RoutedRequest]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._name, self._numbers = uuid.uuid4().hex[:6], itertools.count()
        self._changing = asyncio.Lock()  # the weights
        self._bring_newest: Callable[[Member], Awaitable[Any]] | None = None
        self._newest: int | None = None  # the version that it brings
        self._deadline = LearnedDeadline(update_s)
        self._drifts: tuple[Drift, Drift] | None = None  # the worst of all replicas: at the first update, and so far

    def acknowledged(self) -> dict[int, int]:
        live = [member for member in self._members.live if not member.behind]
        return {member.index: member.acknowledged for member in live if member.acknowledged is not None}

    async def stats(self) -> dict[int, ReplicaStats]:
        while True:
            serving = await self._members.wait_for_serving()
            calls = [self._members.call(member, member.client.stats()) for member in serving]
            stats = await asyncio.gather(*calls, return_exceptions=True)
            found = {m.index: each for m, each in zip(serving, stats, strict=True) if isinstance(each, ReplicaStats)}
            if found:
                return found

    # ------------------------------------------------------------------------------------------------------ sampling

    async def sample(self, request: SampleRequest, told: Callable[[Progress], None] | None = None) -> SampledSequence:
        """Samples one sequence. Cancelling the caller aborts it on its replica. `told` gets all that it has whenever
        there is more. Raises RoomFailed or WeightsRefused when no replica is left, WeightsGone when none has the newest
        weights and none can have them any more, and BadRequest when replicas do not sample it, or were lost with it."""
        handover = Handover(request, told)
        losses = 0
        while True:
            while not self._members.any_serves:
                await self._members.wait_for_serving()
            try:
                return handover.complete(await self._sample_on(self._route(request.route_key), handover))
            except HandoverNeeded as needed:
                if self._fixed:
                    raise needed.reason from None
                losses += needed.lost
                if losses == MOST_LOSSES:
                    raise BadRequest(
                        f"{losses} replicas were lost while they sampled this request, which may be the cause: it is "
                        f"not tried again. The last loss: {needed.reason}"
                    ) from None
                if self._one_version:
                    handover = Handover(request, told)

    async def _sample_on(self, member: Member, handover: Handover) -> SampledSequence:
        """Raises HandoverNeeded, and the replica's error for the request itself."""
        request = self._on_the_wire(handover.next_request())
        loop = asyncio.get_running_loop()
        routed = RoutedRequest(request, handover, loop.create_future(), loop.time())
        if not self._queued:  # requests of one turn of the event loop go out together
            loop.call_soon(self._send_queued)
        self._queued[member].append(routed)
        member.requests[request.request_id] = routed
        try:
            return await routed.future
        except asyncio.CancelledError:
            self._spawn(self._abort(member, [request.request_id]))
            raise
        finally:
            del member.requests[request.request_id]

    def _on_the_wire(self, request: SampleRequest) -> SampleRequest:
        """Returns the request under a unique id: a replica may be asked for it again, also by another process."""
        return replace(request, request_id=f"{request.request_id}@{self._name}-{next(self._numbers)}")

    def _route(self, key: str) -> Member:
        if self._fixed and not any(member.requests for member in self._members.live):
            self._routes.clear()
        member = self._routes.pop(key, None)
        if member is None or not member.serves:
            serving = self._members.serving
            free = [candidate for candidate in serving if not candidate.updating]
            member = min(free or serving, key=lambda candidate: len(candidate.requests))
        self._routes[key] = member
        if len(self._routes) > ROUTES_KEPT:
            self._routes.popitem(last=False)
        return member

    def _send_queued(self) -> None:
        queued, self._queued = self._queued, defaultdict(list)
        for member, group in queued.items():
            if waited_for := [routed for routed in group if not routed.future.done()]:
                self._spawn(self._stream(member, waited_for), member)
                if not member.followed and not self._fixed:
                    self._spawn(self._follow(member), member)

    async def _stream(self, member: Member, group: list[RoutedRequest]) -> None:
        """Sends one group of requests and hands out what comes back; leaves none of them with this replica."""
        silent = set(group)
        try:
            async for index, outcome in member.client.sample([routed.request for routed in group]):
                self._take(member, group[index], outcome)
                silent.discard(group[index])
            if any(not routed.future.done() for routed in silent):
                raise RoomFailed(f"{member.name} ended its answers before this one")
        except TriremeError as failure:
            self._members.fail(member, failure)
        for routed in group:
            if not routed.future.done():
                routed.settle(HandoverNeeded(RoomFailed(f"{member.name} gave up request {routed.request.request_id}")))

    def _take(self, member: Member, routed: RoutedRequest, outcome: Outcome) -> None:
        """Raises ProvenanceError when the replica names weights that it was not given, RoomFailed when none of its
        answers makes sense. A single senseless answer is left to the caller."""
        sense = True
        if isinstance(outcome, SampledSequence | Progress):
            if self._updates:
                member.check_given("sampled tokens from", [span.identity for span in outcome.spans])
            sense = member.makes_sense(outcome, self._vocab_size)
        if not isinstance(outcome, Progress):
            routed.settle(outcome)
        elif sense:
            routed.handover.add(outcome)

    async def _follow(self, member: Member) -> None:
        """Collects the progress of the member's requests while it has any; of those that none reads, more seldom."""
        member.followed, tick_s = True, self._progress_s or PROGRESS_S
        ticks, seldom = itertools.count(1), max(round(PROGRESS_S / tick_s), 1) if tick_s else 1
        try:
            await asyncio.sleep(tick_s)
            while member.requests:
                every = not next(ticks) % seldom
                known = {n: r.handover.known for n, r in member.requests.items() if every or r.handover.is_read}
                made = await self._members.call(member, member.client.progress(known)) if known else {}
                for name, progress in made.items():
                    if routed := member.requests.get(name):
                        self._take(member, routed, progress)
                await asyncio.sleep(tick_s)
        except TriremeError as failure:
            self._members.fail(member, failure)
        finally:
            member.followed = False

    async def _abort(self, member: Member, request_ids: Sequence[str]) -> None:
        with suppress(TriremeError):  # the member is dismissed then, and its requests with it
            await self._members.call(member, member.client.abort(request_ids))

    def _spawn(self, coroutine: Coroutine[Any, Any, None], member: Member | None = None) -> asyncio.Task[None]:
        """Starts a task and returns it; one for a member ends when the member is gone."""
        task = asyncio.get_running_loop().create_task(coroutine)
        for tasks in (self._tasks, *([member.tasks] if member else [])):  # the loop itself keeps only weak references
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task

    # ------------------------------------------------------------------------------------------------------- weights

    async def offer(self, offer: Offer) -> Session:
        return await self._offers.make_session(offer, self._newest)

    async def update_weights(self, weights: PublishedWeights) -> list[UpdateReport]:
        """Brings every member that serves to `weights`, and those that joiners have waited for long enough. One that
        fails is left out, one that takes too long is left behind, and the others finish; then, in deterministic mode, a
        failure is raised. When none has these weights, waits for one. Raises RoomFailed, WeightsRefused when every
        replica refuses them, and WeightsGone when none can have their bytes any more: the next update brings newer
        ones."""
        self._offers.sent()
        async with self._changing:
            bounded = weights.bounded_by(*self._drifts) if self._drifts else weights
            self._bring_newest = partial(self._update_one, bounded)
            self._newest = weights.identity.version
            members = [m for m in self._members.live if not m.behind or m.stranded or m.rounds >= ROUNDS]
            await asyncio.gather(*map(self._await_update, members))
        failures = [failure for member in members if (failure := member.gone or member.stranded)]
        refused = len(failures) == len(members) and all(isinstance(failure, WeightsRefused) for failure in failures)
        if failures and (self._fixed or refused):
            raise failures[0]
        reports = [member.report for member in members if member.report and not (member.gone or member.behind)]
        reports = reports or [member.report for member in await self._members.wait_for_serving() if member.report]
        if reports:
            now = Drift.worst(report.drift for report in reports)
            first, largest = self._drifts or (now, now)
            self._drifts = first, Drift.worst([largest, now])
        return reports

    async def _await_update(self, member: Member) -> None:
        """Waits until `member` has the newest weights or is gone, or is left behind because it takes too long."""
        limit_s = None if self._fixed else self._deadline.seconds
        if await self._wait_for(member, limit_s):
            log.warning(
                "%s has not taken the newest weights within %.0f s, far longer than any update so far: the update does "
                "not wait for it, and it gets no requests until it has them",
                member.name,
                limit_s,
            )
            member.behind, member.rounds = True, 0

    async def _wait_for(self, member: Member, limit_s: float | None) -> bool:
        """Waits until `member` is at the newest weights or gone. Returns True if neither is so after `limit_s`."""
        if member.catching_up is None or member.catching_up.done():
            member.catching_up = self._spawn(self._catch_up(member), member)
        done, late = await asyncio.wait({member.catching_up}, timeout=limit_s)
        for task in done:
            if not task.cancelled():
                task.result()
        return bool(late)

    async def _catch_up(self, member: Member) -> None:
        """Brings `member` to the newest weights, however often they change meanwhile; then it serves. It is stranded
        if the bytes of the newest are gone."""
        brought: object = None
        gone: WeightsGone | None = None
        with suppress(TriremeError):  # it is gone then
            while (bring := self._bring_newest) and bring is not brought:
                brought, gone, member.stranded = bring, None, None
                member.rounds += 1
                try:
                    await bring(member)
                except WeightsGone as error:  # it takes a newer one, if there is one by now
                    gone = error
            if gone:
                self._members.strand(member, gone)
            else:
                await self._bring_adapters(member)
                if not member.gone:
                    self._members.enter(member)

    async def _update_one(self, weights: PublishedWeights, member: Member) -> None:
        async def load_and_check() -> UpdateReport:
            report = await member.client.load_weights(weights)
            member.check_given("reports that it has", [report.identity], [weights.identity])
            return report

        now = asyncio.get_running_loop().time
        started, member.updating = now(), True
        member.given.append(weights.identity)
        try:
            member.report = await self._members.call(member, load_and_check())
        except WeightsGone:  # else no update would ever wait for one that fetches longer than versions are kept
            self._deadline.note(now() - started)
            raise
        finally:
            member.updating = False
        self._deadline.note(now() - started)
        member.acknowledged = weights.identity.version

    async def adopt(self, identity: WeightIdentity) -> None:
        self._bring_newest, self._newest = partial(self._adopt_one, identity), identity.version
        await asyncio.gather(*map(self._bring_newest, self._members.live))

    async def _adopt_one(self, identity: WeightIdentity, member: Member) -> None:
        await self._members.call(member, member.client.adopt(identity))
        member.given.append(identity)
        member.acknowledged = identity.version

    # ------------------------------------------------------------------------------------------------------ adapters
    # They are beside the weights that updates bring. An adapter has a name that is never used again: its values do not
    # change, so nothing has to stand still while others come and go. A new version is another one.

    async def load_adapter(self, name: str, weights: PublishedWeights) -> None:
        """Brings an adapter to every replica, for requests that name it, also to those that join later. One that fails
        is used no more. Raises RoomFailed or WeightsRefused when no replica is left."""
        self._members.adapters[name] = weights
        await asyncio.gather(*map(self._bring_adapters, self._members.serving))
        await self._members.wait_for_serving()

    async def drop_adapter(self, name: str) -> None:
        self._members.adapters.pop(name, None)
        await asyncio.gather(*(self._drop(member, name) for member in self._members.live if name in member.adapters))

    async def _bring_adapters(self, member: Member) -> None:
        """Brings those that `member` does not have. If one fails, the member is gone."""
        for name, weights in list(self._members.adapters.items()):
            if name not in member.adapters:
                member.adapters.add(name)
                member.given.append(weights.identity)
                try:
                    await self._members.call(member, member.client.load_adapter(name, weights))
                except TriremeError as failure:
                    self._members.fail(member, failure)
                    return

    async def _drop(self, member: Member, name: str) -> None:
        member.adapters.discard(name)
        with suppress(TriremeError):  # it is gone then
            await self._members.call(member, member.client.drop_adapter(name))

    # ------------------------------------------------------------------------------------------------------- members

    async def join(self, index: int, client: ReplicaClient) -> None:
        self.leave(index, f"{client.name} has a successor")
        joiner = Member(index, client)
        self._members.add(joiner)
        await self._wait_for(joiner, None)
        if joiner.gone:
            raise joiner.gone

    def leave(self, index: int, reason: str) -> None:
        """Dismisses replica `index`, which its watcher found dead. `next_failure` does not report it."""
        if member := self._members.by_index.get(index):
            self._members.dismiss(member, RoomFailed(reason))

    async def drain(self, index: int, timeout_s: float) -> None:
        if (member := self._members.by_index.get(index)) is None:
            return
        member.draining = True
        await self._without_requests(member, timeout_s)
        if member.requests:
            self._spawn(self._abort(member, list(member.requests)))
            await self._without_requests(member, HAND_OVER_S)
        await self._offers.await_sent(member)
        self._members.dismiss(member, RoomFailed(f"{member.name} was drained"))

    async def _without_requests(self, member: Member, timeout_s: float) -> None:
        """Returns when the requests that `member` has now have left it, or after `timeout_s` seconds."""
        if futures := [routed.future for routed in member.requests.values()]:
            await asyncio.wait(futures, timeout=timeout_s)

    async def next_failure(self) -> tuple[int, str]:
        return await self._members.next_failure()
