"""The one owner of a run's replicas: which there are, what each of them holds, and how all get new weights.

    driver, supervisor --join, leave, drain, offer, update--> ReplicaSet --load_weights, offer--> replicas
             ^                                                    |
             +--------------- table of all replicas, numbered ----+
                                                                  v
                                        routers (orchestrator, service, own loops) --requests--> replicas

It lives in one event loop: as a Ray actor (`inference.replica_set.handle`), or in the process of its router.

Weights. An update waits for the members that serve, each for ten times as long as the slowest update so far
(`LearnedDeadline`). A member that takes longer is left behind, like one that joins: nothing waits for it, it gets no
requests, and it serves (again) once it has the newest weights, however many versions that takes. If it is dead, the
watcher of the processes finds out. A member that finds the bytes of a version gone takes a newer one; if there is none
yet, it is left behind until the next update, which waits for it.

A set that is lost has a successor, a new incarnation, while the replicas work on. All replicas begin behind in it,
because it does not know what they hold. None serves again before the driver, which publishes all weights, has repeated
its newest update, and none with older weights than that.

Sleep. While the trainer has their devices all replicas sleep. Then no replica has weights or serves, and one that joins
goes to sleep too. The next update wakes them: each serves when it has taken the new weights.

Adapters are loaded in addition to the weights of updates. An adapter has a name that is never used again, and its
values do not change, so nothing has to stand still while others come and go. A new version of an adapter is a new
adapter.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.replica_set.offers import Offers
from inference.replica_set.table import (
    Departure,
    EndedUpdate,
    Generation,
    NewestTable,
    Number,
    ReplicaCalls,
    ReplicaRow,
    Table,
    check_issued,
)
from trireme.core.actors import remote_method
from trireme.core.deadline import LearnedDeadline
from trireme.core.errors import RoomFailed, TriremeError, WeightsGone, WeightsRefused, as_failure
from trireme.core.sampler import Heartbeat
from trireme.core.transport import Offer, Session
from trireme.core.types import WeightIdentity
from trireme.core.weights import Drift, PublishedWeights, UpdateReport
from trireme.process.environ import redirect_output

if TYPE_CHECKING:
    from inference.handle import ReplicaClient

HAND_OVER_S = 5.0
IDLE_TICK_S = 0.2
IDLE_LOOKS = 2
"""A replica that leaves has finished its requests when it was idle at this number of looks in a row: after the first
look answers may still be on their way."""
ROUNDS = 2
"""When a member has begun to take weights this number of times since it served last, the next update waits for it: else
updates that follow each other closely would keep it out for ever."""
ISSUED = 64
"""Most weights and adapters that a table lists for a replica: routers remember what earlier tables listed."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Member:
    """One replica in a replica set: its row in the table, the calls to it, and its tasks."""

    index: int
    row: ReplicaRow
    """Its row in the table."""
    calls: ReplicaCalls
    publish: Callable[[], None]
    """Called when the row has changed."""
    adapters: set[str] = field(default_factory=set)
    """The names of the adapters that the replica was given."""
    report: UpdateReport | None = None
    rounds: int = 0
    """How often the replica has begun to take weights since it served last."""
    catching_up: asyncio.Task[None] | None = None
    """The task that brings the newest weights to the replica, or puts it to sleep."""
    offering: asyncio.Task[TriremeError | None] | None = None
    """The task that waits for the replica's answer to an offer; None: the replica owes no answer."""

    @property
    def name(self) -> str:
        return self.row.client.name

    @property
    def failure(self) -> TriremeError | None:
        return self.calls.failure

    @property
    def waits(self) -> bool:
        """True if no weights are on their way to the replica; it keeps its version until the next update."""
        return self.catching_up is None or self.catching_up.done()

    @property
    def serves(self) -> bool:
        """True if the replica takes requests."""
        return self.row.serves and not self.failure

    @property
    def receives(self) -> bool:
        """True if the replica can receive a version while the trainer sends it: it serves, or it sleeps until the next
        update."""
        return (self.row.serves or (self.row.asleep and not self.row.draining)) and not self.failure

    def change(self, **columns: Any) -> None:
        """Changes fields of the replica's ReplicaRow, given by name, and publishes a table with the new row."""
        self.row = replace(self.row, **columns)
        self.publish()

    def issue(self, identity: WeightIdentity, **columns: Any) -> None:
        """Notes in the replica's row that it is about to get the weights `identity`, and changes other fields of the
        row, given by name, as `change` does. Publishes a table with the new row."""
        self.change(issued=(*self.row.issued[1 - ISSUED :], identity), **columns)

    def enter(self) -> None:
        """Lets the replica serve, because it has the newest weights. Publishes a table."""
        self.rounds = 0
        self.change(behind=False, stranded=None, asleep=False)


class ReplicaSet:
    """Owns the replicas: members join and leave, and take new weights and adapters. Publishes a `Table` of its members
    after each change; routers choose replicas from the newest table.

    A replica that fails gets no further requests: later tables list it as departed, with the reason. When no replica is
    left, updates wait for one to join.
    """

    def __init__(
        self,
        replicas: Mapping[int, ReplicaClient],
        *,
        generations: Mapping[int, Generation] | None = None,
        incarnation: int = 1,
        lowest: WeightIdentity | None = None,
        adopt: WeightIdentity | None = None,
        fixed: bool = False,
        patience_s: float = 0.0,
        update_s: float = math.inf,
    ) -> None:
        """`replicas`: {number: client} of the first members. They serve at once, unless `lowest` or `adopt` is given.
        `generations`: {number: the permanent name of this replica}; None: chosen here.
        `incarnation`: 1 for the first replica set of a run; a set that replaces a lost one has a higher number, and its
        tables count as newer than all tables of the lost set.
        `lowest`: the weights of the newest update that a lost incarnation was given. A replica serves only once it has
        these weights or newer ones. If `lowest` is None, there is no such limit.
        `adopt`: a name for the weights that the replicas loaded from disk, so that they need no first update.
        `fixed`: deterministic mode; an update waits as long as it takes, and raises the failure of a replica.
        `patience_s`: when no replica is left, the seconds to wait for one to join.
        `update_s`: the most seconds that an update waits for a replica; its client has a deadline of its own.
        """
        self._incarnation = incarnation
        self._fixed = fixed
        self._patience_s = patience_s
        self._listeners: list[Callable[[Table], object]] = []
        self._newest_table = NewestTable()
        self._by_index: dict[int, Member] = {}
        self._joined = 0
        self._departed: dict[int, Departure] = {}
        self._offers = Offers(lambda: self._by_index.values())
        self._changing = asyncio.Lock()  # the weights
        self._bring_newest: Callable[[Member], Awaitable[object]] | None = None
        self._newest: WeightIdentity | None = None  # that it brings
        self._sleeping = False  # until the next update
        self._lowest = lowest
        self._last_update: EndedUpdate | None = None
        self._adapters: dict[str, PublishedWeights] = {}  # that all members have beside the weights of updates
        self._deadline = LearnedDeadline(update_s)
        self._drifts: tuple[Drift, Drift] | None = None  # the worst of all replicas: at the first update, and so far
        if adopt:
            self._bring_newest = partial(self._adopt, adopt)
            self._newest = adopt
        self._publish()
        for index, client in replicas.items():
            member = self._add(index, client, (generations or {}).get(index))
            if not (adopt or lowest):
                member.enter()

    # ---- as an actor

    @remote_method
    async def start(self, log_dir: Path | None) -> None:
        """Redirects this process's output to its log in `log_dir`, and begins to bring weights to the first members.
        Called only in an actor."""
        redirect_output(log_dir, "replica_set_0")
        for member in self._by_index.values():
            self._begin_to_catch_up(member)

    @remote_method
    async def heartbeat(self) -> Heartbeat:
        """Returns this process's id and node, which shows that the event loop runs."""
        import ray  # here, because a set in the process of its router needs none

        return Heartbeat((os.getpid(),), ray.get_runtime_context().get_node_id())

    # ---- tables

    @remote_method
    async def table(self, after: Number, wait_s: float) -> Table:
        """Waits up to `wait_s` seconds for a table with a higher number than `after`. Returns the newest table."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._newest_table.wait_until(lambda table: table.number > after)
        return self._newest_table.table

    def listen(self, take: Callable[[Table], object]) -> None:
        """Calls `take` with the newest table now, and with each later table of this replica set when it is
        published."""
        self._listeners.append(take)
        take(self._newest_table.table)

    def _publish(self) -> None:
        number = (self._incarnation, self._newest_table.table.number[1] + 1)
        rows = {index: member.row for index, member in self._by_index.items()}
        asleep = self._sleeping and all(row.asleep for row in rows.values())
        table = Table(number, rows, dict(self._departed), self._last_update, self._patience_s, asleep)
        self._newest_table.take(table)
        for take in self._listeners:
            take(table)

    # ---- members

    @remote_method
    def join(self, index: int, client: ReplicaClient, generation: Generation | None = None) -> None:
        """Adds replica `index`, a new replica or the successor of a lost one, and begins to bring it the newest
        weights. Once the replica has them it serves, and a table says so. Until then updates do not wait for the
        replica. If the bytes of the newest weights are gone, the replica waits for the next update.

        `client` calls the replica; `generation` is the replica's permanent name (None: chosen here).
        """
        self.leave(index, f"{client.name} has a successor")
        self._begin_to_catch_up(self._add(index, client, generation))

    @remote_method
    def leave(self, index: int, reason: str) -> None:
        """Removes replica `index` for `reason`: the watcher of its processes found it dead, or it has a successor."""
        member = self._by_index.get(index)
        if member:
            self._dismiss(member, RoomFailed(reason))

    @remote_method
    async def drain(self, index: int, timeout_s: float) -> None:
        """Gives replica `index` no new requests, and removes it when its requests in flight have finished. Requests
        that have not finished after `timeout_s` seconds are ended, and other replicas finish them from their tokens so
        far. Before the removal, also waits until no weights are on their way to the replica."""
        member = self._by_index.get(index)
        if member is None:
            return
        member.change(draining=True)
        with suppress(TriremeError):  # it is gone then
            if not await self._is_idle(member, timeout_s):
                await member.calls.call(member.row.client.abort_all())
                await self._is_idle(member, HAND_OVER_S)
        await self._offers.await_sent(member)
        self._dismiss(member, RoomFailed(f"{member.name} was drained"))

    @remote_method
    def report(self, index: int, generation: Generation, failure: TriremeError) -> None:
        """Removes replica `index`, because a router's call to it raised `failure`. Does nothing if `generation` is not
        the generation of the present replica `index`: a successor has not failed."""
        member = self._by_index.get(index)
        if member and member.row.generation == generation:
            self._fail(member, failure)

    def _add(self, index: int, client: ReplicaClient, generation: Generation | None) -> Member:
        self._joined += 1
        row = ReplicaRow(generation or (self._incarnation, self._joined), client)
        member = Member(index, row, ReplicaCalls(lambda failure: self._fail(member, failure)), self._publish)
        self._by_index = dict(sorted({**self._by_index, index: member}.items()))
        self._publish()
        return member

    def _fail(self, member: Member, failure: TriremeError) -> None:
        """Removes `member` because of `failure`, an error in a call to it, and logs that."""
        if not member.failure:
            log.error("%s. It is used no more; its requests go to other replicas.", failure)
        self._dismiss(member, failure)

    def _dismiss(self, member: Member, reason: TriremeError) -> None:
        if member.failure:
            return
        del self._by_index[member.index]
        self._departed[member.index] = Departure(member.row.generation, reason)
        member.calls.end(reason)
        self._publish()

    async def _is_idle(self, member: Member, timeout_s: float) -> bool:
        """Waits up to `timeout_s` seconds until `member` has no requests. Returns True if it has none."""
        looks = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    stats = await member.calls.call(member.row.client.stats())
                    looks = 0 if stats.running or stats.waiting else looks + 1
                    if looks == IDLE_LOOKS:
                        return True
                    await asyncio.sleep(IDLE_TICK_S)
        return False

    # ---- weights

    @remote_method
    async def offer(self, offer: Offer) -> Session:
        """Asks the replicas to receive a version while the trainer sends it. After at most `offer.ready_s` seconds,
        returns the transfer (`Session`) to the replicas that are ready by then, perhaps to none of them. The other
        replicas fetch the version later."""
        return await self._offers.make_session(offer, self._newest)

    async def update(self, weights: PublishedWeights) -> list[UpdateReport]:
        """Brings `weights` to the members. Waits for each member that serves, that waits for an update, or that has
        been catching up for ROUNDS versions. A member that fails is removed; a member that takes too long is left
        behind, without requests. If no member has `weights` after that, waits until one serves. Returns the members'
        reports; after a second call for the same weights the replicas return the same reports.

        Raises RoomFailed if no replica is left, and WeightsRefused if every replica refuses the weights. Raises
        WeightsGone if no replica can get the bytes any more; the next update then brings newer weights. In
        deterministic mode raises the failure of any member.
        """
        identity = weights.identity
        try:
            reports = await self._bring(weights)
        except Exception as error:
            self._last_update = EndedUpdate(identity, failure=as_failure("the update of replicas", error))
            raise
        else:
            self._last_update = EndedUpdate(identity, reports)
            return reports
        finally:
            self._publish()

    @remote_method
    async def try_update(self, weights: PublishedWeights) -> None:
        """Does `update`, but raises nothing: the caller reads in the set's next table how the update ended."""
        with suppress(Exception):
            await self.update(weights)

    async def _bring(self, weights: PublishedWeights) -> list[UpdateReport]:
        self._offers.sent()
        async with self._changing:
            if self._drifts:
                bounded = weights.bounded_by(*self._drifts)
            else:
                bounded = weights
            self._bring_newest = partial(self._load, bounded)
            self._newest = weights.identity
            if self._sleeping:
                self._sleeping = False
                self._publish()  # lost replicas may start again
            members = [m for m in self._by_index.values() if not m.row.behind or m.waits or m.rounds >= ROUNDS]
            await asyncio.gather(*map(self._await_update, members))
        failures = [failure for member in members if (failure := member.failure or member.row.stranded)]
        refused = len(failures) == len(members) and all(isinstance(failure, WeightsRefused) for failure in failures)
        if failures and (self._fixed or refused):
            raise failures[0]
        reports = [member.report for member in members if member.report and not (member.failure or member.row.behind)]
        if not reports:
            await self._newest_table.wait_for_serving()
            reports = [member.report for member in self._serving if member.report]
        if reports:
            now = Drift.worst(report.drift for report in reports)
            first, largest = self._drifts or (now, now)
            self._drifts = first, Drift.worst([largest, now])
        return reports

    @remote_method
    async def sleep(self) -> None:
        """Puts all members to sleep until the next update. Returns when all sleep; the set's table then says so too. A
        member that fails is removed; in deterministic mode its failure is raised."""
        async with self._changing:
            self._bring_newest = self._put_to_sleep
            self._sleeping = True
            self._publish()
            members = list(self._by_index.values())
            while not self._newest_table.table.asleep:  # again for one that joins
                await asyncio.wait(map(self._begin_to_catch_up, self._by_index.values()))
        failures = [member.failure for member in members if member.failure]
        if self._fixed and failures:
            raise failures[0]

    @property
    def _serving(self) -> list[Member]:
        return [member for member in self._by_index.values() if member.serves]

    async def _await_update(self, member: Member) -> None:
        """Waits until `member` has the newest weights or is gone. If the member takes too long, marks it as left
        behind, so that it gets no requests, and returns."""
        limit_s = None if self._fixed else self._deadline.seconds
        _, late = await asyncio.wait({self._begin_to_catch_up(member)}, timeout=limit_s)
        if late:
            log.warning(
                "%s has not taken the newest weights within %.0f s, far longer than any update so far: the update does "
                "not wait for it, and it gets no requests until it has them",
                member.name,
                limit_s,
            )
            member.rounds = 0
            member.change(behind=True)

    def _begin_to_catch_up(self, member: Member) -> asyncio.Task[None]:
        """Starts a task that brings the newest weights to `member` or, while all replicas sleep, puts the member to
        sleep. Returns this task, or the member's running task if there is one. The task ends when the member has the
        weights, sleeps or is gone, or when the bytes of the weights are gone."""
        if member.catching_up is None or member.catching_up.done():
            member.catching_up = asyncio.create_task(self._catch_up(member))
            member.calls.add(member.catching_up)
        return member.catching_up

    async def _catch_up(self, member: Member) -> None:
        """Brings the newest weights to `member`, however often they change meanwhile, and then lets it serve. While all
        replicas sleep, puts the member to sleep instead. If the bytes of the newest weights are gone, marks the member
        as stranded: it gets no requests before the next update."""
        brought: object = None
        lost_bytes: WeightsGone | None = None
        try:
            while (bring := self._bring_newest) and bring is not brought:
                brought = bring
                lost_bytes = None
                member.rounds += 1
                try:
                    await bring(member)
                except WeightsGone as error:  # it takes a newer one, if there is one by now
                    lost_bytes = error
            if lost_bytes:
                log.warning("%s. It gets no requests until the next update, which brings it newer weights.", lost_bytes)
                member.change(behind=True, stranded=lost_bytes)
            elif not self._sleeping and (self._lowest is None or (self._newest and self._newest >= self._lowest)):
                await self._bring_adapters(member)
                member.enter()
        except Exception as error:  # a TriremeError is why it is gone; nothing else would tell of another one
            self._fail(member, as_failure(member.name, error))

    async def _load(self, weights: PublishedWeights, member: Member) -> None:
        async def load_and_check() -> UpdateReport:
            report = await member.row.client.load_weights(weights)
            check_issued(f"{member.name} reports that it has", [report.identity], [weights.identity])
            return report

        now = asyncio.get_running_loop().time
        started = now()
        member.issue(weights.identity, updating=True, stranded=None)
        try:
            member.report = await member.calls.call(load_and_check())
        except WeightsGone:  # else no update would ever wait for one that fetches longer than versions are kept
            self._deadline.note(now() - started)
            raise
        finally:
            member.change(updating=False)
        self._deadline.note(now() - started)
        member.change(acknowledged=weights.identity.version)

    async def _put_to_sleep(self, member: Member) -> None:
        await member.calls.call(member.row.client.sleep())
        member.change(asleep=True)

    async def _adopt(self, identity: WeightIdentity, member: Member) -> None:
        await member.calls.call(member.row.client.adopt(identity))
        member.issue(identity, acknowledged=identity.version)

    # ---- adapters

    async def load_adapter(self, name: str, weights: PublishedWeights) -> None:
        """Loads an adapter on every replica, for requests that name it; replicas that join later load it too. A replica
        that fails is removed. Raises RoomFailed or WeightsRefused when no replica is left."""
        self._adapters[name] = weights
        await asyncio.gather(
            *map(self._bring_adapters, self._serving), return_exceptions=True
        )  # one that fails is gone
        await self._newest_table.wait_for_serving()

    async def drop_adapter(self, name: str) -> None:
        """Makes every replica forget the adapter `name`; no request in flight may name it."""
        self._adapters.pop(name, None)
        holders = [member for member in self._by_index.values() if name in member.adapters]
        for member in holders:
            member.adapters.discard(name)
        calls = [member.calls.call(member.row.client.drop_adapter(name)) for member in holders]
        await asyncio.gather(*calls, return_exceptions=True)  # one that fails is gone

    async def _bring_adapters(self, member: Member) -> None:
        """Loads the adapters that `member` lacks. Raises TriremeError if a load fails; the member is removed then."""
        for name, weights in list(self._adapters.items()):
            if name not in member.adapters:
                member.adapters.add(name)
                member.issue(weights.identity)
                await member.calls.call(member.row.client.load_adapter(name, weights))
