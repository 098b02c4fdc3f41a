"""All replicas behind one sampler: routes requests to replicas, and gives the requests of a lost replica to others.

A router is a library in each process that samples (orchestrator, service, a loop of your own), in one event loop. It
reads the tables of the replica set (`inference.replica_set`), which owns the replicas.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from inference.handover import Handover, Outcome, Progress
from inference.replica_set.table import NewestTable, ReplicaCalls, ReplicaRow, Table, check_issued
from trireme.core.errors import BadRequest, ProvenanceError, ReplicaBehind, RoomFailed, TriremeError
from trireme.core.sampler import OnProgress, OnVersions, ReplicaStats
from trireme.core.types import SampledSequence, SampleRequest, WeightIdentity
from trireme.core.weights import UpdateReport

if TYPE_CHECKING:
    from inference.handle import ReplicaClient
    from inference.replica_set.actor import ReplicaSet
    from inference.replica_set.handle import RemoteSet

ROUTES_KEPT = 65536
MOST_LOSSES = 2
"""A request that was in flight on this number of replicas when they were lost is given to no other replica."""
PROGRESS_S = 1.0
AGAIN_S = 10.0
"""Seconds after which a router that does not report failures tries a failed replica again."""
TOUCHED_S = 0.05
"""Seconds. A replica that is lost sooner after it was given a request was dead before, and the request did not cause
that: replicas of a node die together."""
SENSELESS = 4
"""After this many senseless answers in a row (`Target.makes_sense`) the replica has failed; fewer may be due to the
requests."""
SHOWN = 4
log = logging.getLogger(__name__)


class HandoverNeeded(Exception):
    """Raised when a replica does not finish a request, so that another replica has to. `reason`: why. `lost`: the
    replica failed while it had the request, so the request may be the cause of the failure."""

    def __init__(self, reason: TriremeError, *, lost: bool = False) -> None:
        self.reason = reason
        self.lost = lost


@dataclass(eq=False, slots=True)
class RoutedRequest:
    """A request that was given to a replica, its tokens so far, and the future for its answer."""

    request: SampleRequest
    handover: Handover
    """Collects the tokens that the request has so far."""
    future: asyncio.Future[SampledSequence]
    """Where the caller waits for the answer."""
    since: float
    """When the request was given to the replica, in seconds by the clock of the event loop."""

    def settle(self, outcome: SampledSequence | Exception) -> None:
        """Gives the caller the answer or an error. Does nothing if the caller was cancelled or has an outcome
        already."""
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class Target:
    """A replica as this router uses it: its row in the table of the replica set, its requests, and `serves`: whether it
    takes requests (an attribute, not a property, for speed)."""

    def __init__(
        self, index: int, row: ReplicaRow, fails: Callable[[Target, TriremeError], None], needs_weights: bool
    ) -> None:
        """`fails` is called with this target and the error when a call to the replica raises. `needs_weights`: the
        replica serves only once a table says that it has taken weights."""
        self.index = index
        self.row = row
        self._needs_weights = needs_weights
        self.client = row.client  # the one that samples: each table brings another that calls the same replica
        self.calls = ReplicaCalls(lambda failure: fails(self, failure))
        self.issued: dict[WeightIdentity, None] = {}
        """All weights and adapters that tables have listed for this replica, oldest first."""
        self.requests: dict[str, RoutedRequest] = {}
        """The requests that the replica has, by the ids under which they were sent to it."""
        self.serves = False
        self.followed = False
        """True while a task asks the replica for progress."""
        self.senseless = 0
        """Number of senseless answers in a row."""

    def take(self, row: ReplicaRow) -> None:
        """Takes `row`, the replica's row in a newer table of the replica set, and updates `serves` and `issued` by
        it."""
        self.row = row
        has_weights = row.acknowledged is not None or not self._needs_weights
        self.serves = row.serves and has_weights and not self.calls.failure
        self.issued.update(dict.fromkeys(row.issued))

    def makes_sense(self, answer: SampledSequence | Progress, vocab_size: int | None) -> bool:
        """Returns True if `answer` makes sense: every token has a finite log-probability and is in range(`vocab_size`).
        If `vocab_size` is None, the size is not known, and any token >= 0 is accepted. After SENSELESS senseless
        answers in a row, raises RoomFailed."""
        tokens = answer.tokens
        logprobs = answer.logprobs
        # Ufuncs, without the Python around them. A negative token is a large one without its sign, and a sum is finite
        # if all are: one pass over each.
        in_vocabulary = not len(tokens) or np.maximum.reduce(tokens.view(np.uint32)) < (vocab_size or 2**31)
        if in_vocabulary and math.isfinite(np.add.reduce(logprobs)) and len(logprobs) == len(tokens):
            self.senseless = 0
            return True
        self.senseless += 1
        if self.senseless >= SENSELESS:
            finite = np.isfinite(logprobs).sum()
            raise RoomFailed(
                f"{self.client.name} gave {SENSELESS} answers in a row that make no sense. Tokens of the last answer: "
                f"{len(tokens)} ({tokens[:SHOWN].tolist()} ..); finite log-probabilities: {finite}; expected one for "
                f"each token, and tokens from a vocabulary of {vocab_size}"
            )
        return False

    def is_lost_by(self, reason: TriremeError | None) -> bool:
        """Returns True if this replica's requests may have caused its loss: if `reason` is a RoomFailed, and the
        replica was neither leaving nor taking weights."""
        return type(reason) is RoomFailed and not (self.row.draining or self.row.updating)

    def end(self, reason: TriremeError, *, lost: bool) -> None:
        """Gives the replica up, for `reason`. Other replicas finish its requests from their tokens so far. For a
        ProvenanceError (the replica named weights that it was not given) the tokens that it reported are dropped.
        `lost`: the requests may have caused the loss."""
        self.serves = False
        for routed in self.requests.values():
            if isinstance(reason, ProvenanceError):
                routed.handover.forget_last_replica()
            touched = routed.future.get_loop().time() - routed.since >= TOUCHED_S
            routed.settle(HandoverNeeded(reason, lost=lost and touched))
        self.calls.end(reason)


class Router:
    """Routes requests to the replicas of a replica set. Implements `trireme.core.sampler.Sampler`.

    Requests of equal `route_key` stay on one replica, because they share prefixes. They stay there even while the
    replica takes weights: waiting for it is quicker than computing the prefix on another replica. Other requests go to
    a replica that is not taking weights, if there is one, and among several to one with the fewest requests in flight.

    A replica that fails gets no further requests, and is reported to the replica set. Another replica finishes its
    requests from their tokens so far (`inference.handover`). But if a request was in flight on MOST_LOSSES replicas
    when they were lost, the request fails, because it may be the cause. When no replica is left, requests wait for one
    to join. If a replica refuses a request because the replica's weights are older than the request's floor, that
    replica gets no requests until a newer table arrives.

    In deterministic mode routes are forgotten whenever no request is in flight. Requests that are then made in one
    iteration of the event loop are routed by their own order alone: earlier requests, or an earlier process, have no
    influence.
    """

    def __init__(
        self,
        source: ReplicaSet | RemoteSet | None = None,
        on_versions: OnVersions = lambda _versions: None,
        *,
        fixed: bool = False,
        one_version: bool = False,
        vocab_size: int | None = None,
        progress_s: float | None = None,
        reports: bool = True,
        attempt: int = 0,
    ) -> None:
        """`source`: the replica set; None: call `follow` later, maybe several times.
        `on_versions`: called with {replica: acknowledged version} whenever a replica joins, leaves, fails or
        acknowledges a version, and at the end of an update.
        `fixed`: deterministic mode; a lost replica's failure is raised.
        `one_version`: no sequence has tokens of two versions; after a loss a sequence is sampled again from its prompt.
        `vocab_size`: the model's (None: not known). A replica has failed if SENSELESS answers in a row have tokens
        outside of the vocabulary, or log-probabilities that are not finite.
        `progress_s`: seconds between polls for new tokens of requests whose answers are read while they are sampled
        (None: PROGRESS_S).
        `reports`: failures of replicas are reported to the replica set. False: another router uses the same replicas
        and reports them. This router then tries a failed replica again after AGAIN_S seconds, and does not check which
        weights a replica names. Its requests may come before a run has published weights, and wait for them.
        `attempt`: the number of the present attempt, which this router adds to each request. A replica refuses the
        request if the replica's weights are from an earlier attempt, whatever their version.
        """
        self._newest = NewestTable()
        self._targets: dict[int, Target] = {}
        self._fixed = fixed
        self._one_version = one_version
        self._reports = reports
        self._vocab_size = vocab_size
        self._progress_s = progress_s
        self._attempt = attempt
        self._routes: OrderedDict[str, Target] = OrderedDict()
        self._queued: defaultdict[Target, list[RoutedRequest]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._name = uuid.uuid4().hex[:6]
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._on_versions = on_versions
        if source:
            self.follow(source)

    def follow(self, source: ReplicaSet | RemoteSet) -> None:
        """Takes the tables of `source` from now on; an earlier source is not used any longer."""
        self.source = source
        source.listen(self.take)
        for target in list(self._targets.values()):
            failure = target.calls.failure
            if failure and self._reports:  # the set before may have died before it heard of this
                source.report(target.index, target.row.generation, failure)

    def acknowledged(self) -> dict[int, int]:
        """Returns {number of the replica: the newest version that it has acknowledged}. Leaves out replicas that have
        failed, and replicas that get no requests until they have the newest weights."""
        rows = {index: target.row for index, target in self._targets.items() if not target.calls.failure}
        return {
            index: row.acknowledged for index, row in rows.items() if row.acknowledged is not None and not row.behind
        }

    async def stats(self) -> dict[int, ReplicaStats]:
        while True:
            serving = await self._wait_for_serving()
            calls = [target.calls.call(target.client.stats()) for target in serving]
            stats = await asyncio.gather(*calls, return_exceptions=True)
            by_index = {
                t.index: answer for t, answer in zip(serving, stats, strict=True) if isinstance(answer, ReplicaStats)
            }
            if by_index:
                return by_index

    async def updated(self, identity: WeightIdentity) -> Sequence[UpdateReport]:
        table = await self._newest.wait_until(lambda table: bool(table.update and table.update.identity == identity))
        assert table.update
        if table.update.failure:
            raise table.update.failure
        return table.update.reports

    # ------------------------------------------------------------------------------------------------------ sampling

    async def sample(self, request: SampleRequest, on_progress: OnProgress | None = None) -> SampledSequence:
        """Samples one sequence. Cancelling the caller aborts the request on its replica. `on_progress` is called with
        all tokens so far whenever there are more.

        Raises RoomFailed or WeightsRefused if no replica is left, and WeightsGone if no replica has the newest weights
        or can still get them. Raises BadRequest if a replica refuses the request, or if several replicas were lost
        while they had it.
        """
        handover = Handover(request, on_progress)
        losses = 0
        while True:
            while not self._any_serves:
                await self._wait_for_serving()
            target = self._route(request.route_key)
            try:
                return handover.complete(await self._sample_on(target, handover))
            except ReplicaBehind as behind:  # the table that names it is late: nothing is lost
                log.info("%s; a newer table is awaited", behind)
                target.serves = False
                with suppress(TriremeError):
                    await self._take_newest()
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
                    handover = Handover(request, on_progress)

    @property
    def _any_serves(self) -> bool:
        """True if some replica takes requests. Written for speed, because each request reads it."""
        for target in self._targets.values():  # noqa: SIM110  # `any` takes three times as long
            if target.serves:
                return True
        return False

    @property
    def _serving(self) -> list[Target]:
        return [target for target in self._targets.values() if target.serves]

    async def _wait_for_serving(self) -> list[Target]:
        """Waits until some replica takes requests, and returns all that do. If there is no replica to wait for, raises
        RoomFailed, WeightsRefused or WeightsGone (`NewestTable.wait_for_serving`)."""
        while not self._any_serves:
            self._changed.clear()
            await self._newest.wait_for_serving()
            if not self._any_serves:  # those of the table have failed here, and the next one says so
                await self._changed.wait()
        return self._serving

    async def _sample_on(self, target: Target, handover: Handover) -> SampledSequence:
        """Gives a request to the replica `target` and returns its answer. Raises HandoverNeeded if the replica does not
        finish the request. If the replica refuses the request, raises the replica's error."""
        request = self._on_the_wire(handover.next_request())
        loop = asyncio.get_running_loop()
        routed = RoutedRequest(request, handover, loop.create_future(), loop.time())
        if not self._queued:  # requests of one turn of the event loop go out together
            loop.call_soon(self._send_queued)
        self._queued[target].append(routed)
        target.requests[request.request_id] = routed
        try:
            return await routed.future
        except asyncio.CancelledError:
            self._spawn(self._abort(target, [request.request_id]))
            raise
        finally:
            del target.requests[request.request_id]

    def _on_the_wire(self, request: SampleRequest) -> SampleRequest:
        """Returns the request as it is sent to a replica: with the attempt of the run that this router belongs to, and
        under a unique id, because a replica may get the same request again, also from another process."""
        name = f"{request.request_id}@{self._name}-{next(self._numbers)}"
        return replace(request, request_id=name, attempt=self._attempt)

    def _route(self, key: str) -> Target:
        if self._fixed and not any(target.requests for target in self._targets.values()):
            self._routes.clear()
        target = self._routes.pop(key, None)
        if target is None or not target.serves:
            serving = self._serving
            free = [candidate for candidate in serving if not candidate.row.updating]
            target = min(free or serving, key=lambda candidate: len(candidate.requests))
        self._routes[key] = target
        if len(self._routes) > ROUTES_KEPT:
            self._routes.popitem(last=False)
        return target

    def _send_queued(self) -> None:
        queued = self._queued
        self._queued = defaultdict(list)
        for target, group in queued.items():
            waited_for = [routed for routed in group if not routed.future.done()]
            if waited_for:
                target.calls.add(self._spawn(self._stream(target, waited_for)))
                if not target.followed and not self._fixed:
                    target.calls.add(self._spawn(self._follow(target)))

    async def _stream(self, target: Target, group: list[RoutedRequest]) -> None:
        """Sends a group of requests to a replica and hands out the outcomes. Requests that the replica gave up, with
        Progress as their outcome, are handed over to other replicas."""
        try:
            async for index, outcome in target.client.sample([routed.request for routed in group]):
                await self._check_issued(target, outcome)
                self._hand_out(target, group[index], outcome)
        except TriremeError as failure:
            self._fail(target, failure)
        for routed in group:
            if not routed.future.done():
                gave_up = f"{target.client.name} gave up request {routed.request.request_id}"
                routed.settle(HandoverNeeded(RoomFailed(gave_up)))

    async def _check_issued(self, target: Target, outcome: Outcome) -> None:
        """Raises ProvenanceError when `outcome` names weights that the replica was not given."""
        if not self._reports or isinstance(outcome, TriremeError):
            return
        identities = [span.identity for span in outcome.spans]
        if not all(identity in target.issued for identity in identities):  # the table may be late
            await self._take_newest()
            check_issued(f"{target.client.name} sampled tokens from", identities, target.issued)

    def _hand_out(self, target: Target, routed: RoutedRequest, outcome: Outcome) -> None:
        """Gives an answer or an error to the caller of a request, or adds progress to the request's handover, from
        which another replica can continue. A single senseless answer (for which `Target.makes_sense` is false) goes to
        the caller, who judges it; senseless progress is dropped. At the last of SENSELESS senseless outcomes in a row,
        answers or progress, raises RoomFailed instead."""
        sense = True
        if isinstance(outcome, SampledSequence | Progress):
            sense = target.makes_sense(outcome, self._vocab_size)
        if not isinstance(outcome, Progress):
            routed.settle(outcome)
        elif sense:
            routed.handover.add(outcome)

    async def _follow(self, target: Target) -> None:
        """Asks a replica for its requests' new tokens, again and again, while it has requests. Asks less often for
        requests that are not read while they are sampled."""
        target.followed = True
        tick_s = self._progress_s or PROGRESS_S
        ticks = itertools.count(1)
        seldom = max(round(PROGRESS_S / tick_s), 1) if tick_s else 1
        try:
            await asyncio.sleep(tick_s)
            while target.requests:
                every = not next(ticks) % seldom
                lengths = {n: r.handover.length for n, r in target.requests.items() if every or r.handover.is_read}
                if lengths:
                    progress_of = await target.calls.call(target.client.progress(lengths))
                else:
                    progress_of = {}
                for name, progress in progress_of.items():
                    await self._check_issued(target, progress)
                    routed = target.requests.get(name)
                    if routed:
                        self._hand_out(target, routed, progress)
                await asyncio.sleep(tick_s)
        except TriremeError as failure:
            self._fail(target, failure)
        finally:
            target.followed = False

    async def _abort(self, target: Target, request_ids: Sequence[str]) -> None:
        with suppress(TriremeError):  # the replica is used no more then, and its requests go elsewhere
            await target.calls.call(target.client.abort(request_ids))

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------------------------------------------------ replicas

    def take(self, table: Table) -> None:
        """Takes a table of the replica set: adds, updates and gives up replicas. A late or repeated table changes
        nothing."""
        if not self._newest.take(table):
            return
        before = self._targets
        self._targets = {}
        for index, row in table.rows.items():
            target = before.get(index)
            if target is None or target.row.generation != row.generation:
                target = Target(index, row, self._fail, not self._reports)
            else:
                del before[index]
            self._targets[index] = target
            target.take(row)
        for target in before.values():
            self._leave(target, table.reason(target.index, target.row.generation))
        self._changed.set()
        self._on_versions(self.acknowledged())

    async def _take_newest(self) -> None:
        self.take(await self.source.table((0, 0), 0.0))

    def _leave(self, target: Target, reason: TriremeError | None) -> None:
        """Gives up a replica that is not in the newest table. `reason`: why it is gone. None: it may live on as a
        member of another replica set, so this router's requests are aborted there."""
        if target.calls.failure:
            return
        if reason is None and target.requests:
            self._spawn(_abort_on(target.client, list(target.requests)))
        target.end(reason or RoomFailed(f"{target.client.name} joined again"), lost=target.is_lost_by(reason))

    def _fail(self, target: Target, failure: TriremeError) -> None:
        """Gives a replica up because of `failure`, and reports it to the replica set; a router that does not report
        tries the replica again later."""
        if target.calls.failure:
            return
        target.end(failure, lost=target.is_lost_by(failure))
        if self._reports:
            self.source.report(target.index, target.row.generation, failure)
        else:
            log.warning("%s; it is tried again in %g s unless it is removed", failure, AGAIN_S)
            asyncio.get_running_loop().call_later(AGAIN_S, self._try_again, target)
        self._on_versions(self.acknowledged())

    def _try_again(self, target: Target) -> None:
        if self._targets.get(target.index) is target:
            again = self._targets[target.index] = Target(target.index, target.row, self._fail, not self._reports)
            again.take(target.row)
            self._changed.set()


async def _abort_on(client: ReplicaClient, request_ids: Sequence[str]) -> None:
    with suppress(TriremeError):
        await client.abort(request_ids)
