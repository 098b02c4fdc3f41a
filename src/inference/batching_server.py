"""The replica's side of `inference.messages`: callers hand in requests, and fetch outcomes, several by one call.

exchange(requests) ---> the engine samples them
                                   |
its answer, or a later call's <--- Outbox   gathered for some milliseconds while many are in flight
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from inference.handover import NOTHING, Outcome
from inference.messages import Reply, unpack_requests
from trireme.core.errors import TriremeError, as_failure
from trireme.core.types import SampleRequest

GATHER_S = 0.005
"""Seconds that an outcome waits at most for others."""
FEW = 8
"""An outcome waits for others only while at least FEW requests have none."""
CALLERS = 8
"""Number of outboxes to retain, one for each caller. Beyond it, outboxes of callers with nothing in flight are dropped,
the longest unused first."""

Give = Callable[[str, Outcome], None]
"""Takes the id of a request, and how the request ended."""


class Outbox:
    """Holds the outcomes of one caller's requests until the caller fetches them."""

    def __init__(self) -> None:
        self.unanswered = 0
        """Number of requests without an outcome."""
        self.failure: TriremeError | None = None
        """Why requests could not enter the engine."""
        self._outcomes: list[tuple[str, Outcome]] = []
        self._due = False
        self._timer: asyncio.Handle | None = None
        self._due_at = 0.0
        self._fetching: asyncio.Future[None] | None = None

    @property
    def idle(self) -> bool:
        """True if none of the caller's requests is in flight and no call of `fetch` is waiting."""
        return not self.unanswered and self._fetching is None

    def put(self, name: str, outcome: Outcome) -> None:
        """Adds the outcome of the request `name`, and makes sure that the caller gets it soon."""
        self.unanswered -= 1
        self._outcomes.append((name, outcome))
        self._is_due_after(GATHER_S if self.unanswered >= FEW else 0.0)

    def fail(self, failure: TriremeError) -> None:
        """Makes the next reply say that the replica is unusable, and why."""
        self.failure = failure
        self._is_due_after(0.0)

    async def fetch(self) -> Reply:
        """Waits until outcomes are due, then removes and returns them. Only one call waits at a time: a second call
        makes the first return the outcomes so far, perhaps none. (A caller makes a second call to send further
        requests.)"""
        if self._fetching and not self._fetching.done():
            self._fetching.set_result(None)
        fetching = self._fetching = asyncio.get_running_loop().create_future()
        if self._due:
            fetching.set_result(None)
        try:
            await fetching
        finally:
            if self._fetching is fetching:
                self._fetching = None
        reply = Reply(self._outcomes, self.failure)
        self._outcomes = []
        self._due = False
        if self._timer:
            self._timer.cancel()
            self._timer = None
        return reply

    def _is_due_after(self, seconds: float) -> None:
        """Makes sure that the outcomes are handed out after `seconds`, or at an earlier time that is already set. With
        0 seconds, all outcomes of this iteration of the event loop are handed out together."""
        loop = asyncio.get_running_loop()
        due_at = loop.time() + seconds
        if self._timer and self._due_at <= due_at:
            return
        if self._timer:
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._hand_out)
        self._due_at = due_at

    def _hand_out(self) -> None:
        self._due = True
        self._timer = None
        if self._fetching and not self._fetching.done():
            self._fetching.set_result(None)


class BatchingServer:
    """Takes requests from all callers of one replica, and hands out their outcomes.

    It uses two functions of the replica. `sample(requests, give)` begins to sample `requests` together, and returns
    once they have entered the engine. It raises if the engine can take no requests. When a request ends, `sample` calls
    `give(request id, outcome)`. `failure()` returns why the replica is broken; None if it is not.
    """

    def __init__(
        self,
        sample: Callable[[list[SampleRequest], Give], Awaitable[None]],
        failure: Callable[[], TriremeError | None],
    ) -> None:
        self._sample = sample
        self._failure = failure
        self._outboxes: OrderedDict[str, Outbox] = OrderedDict()
        self._entering: set[asyncio.Task[None]] = set()

    async def exchange(self, caller: str, message: bytes) -> bytes:
        """Begins to sample the packed requests in `message`. Waits until any of this `caller`'s requests, including
        requests from earlier calls, has an outcome, or until the caller makes another call. Returns the outcomes as a
        packed `Reply`."""
        outbox = self._outbox(caller)
        requests = unpack_requests(message)
        if requests:
            outbox.unanswered += len(requests)
            entering = asyncio.create_task(self._enter(requests, outbox))  # it may wait for an update
            self._entering.add(entering)
            entering.add_done_callback(self._entering.discard)
        reply = await outbox.fetch()
        return replace(reply, failure=reply.failure or self._failure()).pack()

    async def _enter(self, requests: list[SampleRequest], outbox: Outbox) -> None:
        pending = {request.request_id for request in requests}

        def give(name: str, outcome: Outcome) -> None:
            pending.remove(name)
            outbox.put(name, outcome)

        try:
            await self._sample(requests, give)
        except Exception as error:
            outbox.fail(as_failure("a replica", error))
            for name in list(pending):
                give(name, NOTHING)

    def _outbox(self, caller: str) -> Outbox:
        outbox = self._outboxes[caller] = self._outboxes.pop(caller) if caller in self._outboxes else Outbox()
        # Of callers that have died. The others called last: an idle one may be about to fetch what is there for it.
        idle = [name for name, other in self._outboxes.items() if other.idle and other is not outbox]
        for name in idle[: max(len(self._outboxes) - CALLERS, 0)]:
            del self._outboxes[name]
        return outbox
