"""Decides which replicas receive a version while the trainer sends it.

    trainer --Offer--> replica set --offer--> replicas that are asked --ready--> it --Session--> trainer, which sends

A session here is a `trireme.core.transport.Session`: the members that one version is sent to.

*Who is asked.* Members that serve or sleep, and have taken all weights that they were to take. The trainer publishes a
version before it waits for the update to the previous version (`trireme.train.phases.overlap`), so some members may
still load the previous one. They are not asked, and fetch the new bytes afterwards, as all replicas do with Ray's
object store. So no replica receives a version while it holds bytes that it has still to load, and a replica never has
bytes of more than one version. Nothing here waits for an update: the trainer gathers and sends while replicas are
updated, as it does without sessions, so there is no circle of waits.

One exception: a member takes a version that was not sent to it. It has to fetch the version, which may last until after
the next offer; then the next version is not sent to it either, and so on. So the offer waits for such a member, once
and at most for half of `Offer.ready_s`; then the member is in the session. The trainer would wait for this update
anyway, after it has sent; so the wait costs, once, the overlap of sending and updating.

*Who sends to whom.* Replicas of one node are in one group (`trireme.core.transport.servers_of`). A replica reports its
node when it has taken weights for the first time; before that it counts as a node of its own.

*Who takes part.* Members that say in time that they are ready. The trainer stands still meanwhile, so the time limit is
short: ten times the slowest answer of this run, at most `Offer.ready_s`. A replica that is late or refuses keeps its
requests: it fetches the bytes, and if it is dead, its other calls or its watcher say so. A replica that has not yet
answered at the next offer is not asked again, so a replica that hangs costs the trainer one time limit, not one for
each version.

*Epochs.* An epoch is a time in which all sessions have the same members, so that their groups of senders and receivers
can be used again. The successor of a lost member has the same number but counts as another member.

*The end.* A member that leaves while a version is on its way to it waits until the version was sent: its death would
hold up the others of its group until the time limit of the offer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from trireme.core.deadline import LearnedDeadline
from trireme.core.errors import TriremeError
from trireme.core.transport import Epochs, Offer, Session, servers_of
from trireme.core.types import WeightIdentity

if TYPE_CHECKING:
    from inference.replica_set.actor import Member

log = logging.getLogger(__name__)


class Offers:
    """Decides which members of a replica set receive each offered version. For each version, makes a
    `trireme.core.transport.Session`, which describes the transfer to these members. Handles one version at a time.
    `members` returns all present members."""

    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        self._members = members
        self._deadline = LearnedDeadline(math.inf)
        self._epochs = Epochs()
        self._group: dict[Member, int] = {}
        """The members of the last session, and the rank that sends to each."""
        self._busy: set[Member] = set()
        """The members that still had to take weights at the last offer."""
        self._warned: set[Member] = set()
        """The members for which the log of this epoch already says why they take no part."""
        self._sent = asyncio.Event()
        self._until = 0.0
        """When the last session is over in any case, in seconds by the event loop's clock."""

    async def make_session(self, offer: Offer, newest: WeightIdentity | None) -> Session:
        """Asks the members that serve or sleep and have taken version `newest` (None: there was none) to receive the
        offered version. After at most `offer.ready_s` seconds, returns the transfer to the members that are ready by
        then."""
        now = asyncio.get_running_loop().time
        started = now()
        limit_s = min(self._deadline.seconds, offer.ready_s)
        self._until = started + offer.timeout_s
        receiving = [member for member in self._members() if member.receives]
        settled = [member for member in receiving if _is_settled(member, newest)]
        servers = _servers(receiving, offer.senders)
        offered = self._offer_all(settled, offer, servers)
        fetching = self._note_busy([member for member in receiving if member not in settled])
        if fetching:
            limit_s = offer.ready_s
            await asyncio.wait(fetching.values(), timeout=limit_s / 2)
            caught_up = [member for member in fetching if member.receives and _is_settled(member, newest)]
            offered |= self._offer_all(caught_up, offer, servers)
        if offered:
            await asyncio.wait(offered.values(), timeout=started + limit_s - now())
        refusals = {member: _refusal(answer, limit_s) for member, answer in offered.items()}
        ready = {member for member, refusal in refusals.items() if member.receives and not refusal}
        self._begin({member: server for member, server in servers.items() if member in ready})
        for member, refusal in refusals.items():
            if refusal and not member.failure and member not in self._warned:
                self._warned.add(member)
                log.warning(
                    "%s takes no part in the sending of version %d and fetches it: %s",
                    member.name,
                    offer.version,
                    refusal,
                )
        return Session(offer.attempt, self._epochs.number, {member.index: rank for member, rank in self._group.items()})

    def sent(self) -> None:
        """Notes that the sending of the last offered version is over: the version was published, or the trainer gave
        up."""
        self._sent.set()

    async def await_sent(self, member: Member) -> None:
        """Waits until no version is on its way to `member`, at most until the time limit of the last offer."""
        if member in self._group:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._until):
                    await self._sent.wait()

    def _begin(self, group: dict[Member, int]) -> None:
        """Records which members receive the offered version. `group`: {member: the trainer's rank that sends to it}. If
        `group` differs from the previous version's, begins a new epoch: the epoch's number increases, and senders and
        receivers make new communication groups (`Session.epoch`)."""
        self._group = group
        self._sent.clear()
        if self._epochs.begins(list(group.items())):
            self._warned.clear()
            names = ", ".join(member.name for member in group)
            log.info("new weights are sent to %s", names or "nobody: they are fetched")

    def _note_busy(self, busy: list[Member]) -> dict[Member, asyncio.Task[None]]:
        """Records `busy`, the members that still have to take weights. Returns {member: the task of its update} for the
        members that this offer waits for. Such a member was not busy at the previous offer, and is now taking a version
        that the trainer did not send to it. Without the wait it would stay busy, so this version would not be sent to
        it either."""
        before = self._busy
        self._busy = set(busy)
        worth = [
            member for member in busy if member not in before and member not in self._group and member.row.updating
        ]
        return {member: member.catching_up for member in worth if member.catching_up}

    def _offer_all(
        self, members: Sequence[Member], offer: Offer, servers: dict[Member, int]
    ) -> dict[Member, asyncio.Task[TriremeError | None]]:
        """Asks `members` to receive the offered version, except those members that still owe an answer to an earlier
        offer. `servers`: {member: the rank that sends to it}. Returns {member: the task of its answer}."""
        free = [member for member in members if not member.offering and member in servers]
        return {member: self._begin_offer(member, replace(offer, server=servers[member])) for member in free}

    def _begin_offer(self, member: Member, offer: Offer) -> asyncio.Task[TriremeError | None]:
        member.offering = asyncio.get_running_loop().create_task(self._offer(member, offer))
        member.calls.add(member.offering)
        return member.offering

    async def _offer(self, member: Member, offer: Offer) -> TriremeError | None:
        """Asks `member` to receive the offered version. Returns None once it is ready, or why it does not take part."""
        now = asyncio.get_running_loop().time
        started = now()
        try:
            await member.row.client.offer(offer)
        except TriremeError as refusal:  # if it is broken, its other calls say so
            return refusal
        finally:
            member.offering = None
        self._deadline.note(now() - started)  # of late ones too: else none would ever be in time again
        return None


def _servers(members: Sequence[Member], ranks: Sequence[int]) -> dict[Member, int]:
    """Returns {member: which of the trainer's `ranks` sends to it}. All members of a node get the same rank, and are
    next to each other in the dict. A member of an unknown node counts as a node of its own."""
    by_index = {member.index: member for member in members}
    nodes = {index: member.report.node if member.report else "" for index, member in sorted(by_index.items())}
    return {by_index[index]: rank for index, rank in servers_of(nodes, ranks).items()}


def _is_settled(member: Member, newest: WeightIdentity | None) -> bool:
    """Returns True if `member` has taken version `newest` and is not taking another."""
    return member.row.acknowledged == (newest and newest.version) and not member.row.updating


def _refusal(answer: asyncio.Task[TriremeError | None], limit_s: float) -> str:
    """Returns why a member takes no part, by its `answer` to an offer; "" if it takes part. `limit_s`: how many seconds
    it had."""
    if not answer.done():
        return f"it was not ready within {limit_s:.1f} s"
    if answer.cancelled():
        return "it is gone"
    return str(answer.result() or "")
