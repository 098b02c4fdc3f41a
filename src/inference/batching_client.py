"""The caller's side of `inference.messages`: a client of one replica, which sends several requests and receives several
outcomes by one call.

    sample(requests) ---> queued ---(at once, or gathered for some milliseconds)---> exchange ---> the replica
           ^                                                                            |
           +---------------------------- outcomes of any requests <--------------------+

Whenever requests are on the replica, one call waits there for outcomes; a later call, which brings requests, ends it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass

from inference.handover import NOTHING, Outcome
from inference.messages import Reply
from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.types import SampleRequest

GATHER_S = 0.002
"""The longest time in seconds that a request waits for others to travel with it, while the replica has at least FEW
requests. Also the longest time from an answer to the next call, so that requests which follow from the answer travel
with that call."""
FEW = 8

Stream = asyncio.Queue[list[tuple[int, Outcome]] | None]
"""Outcomes for the requests of one `BatchingClient.sample`, as (index of the request, outcome); None: the end."""
Exchange = Callable[[str, list[SampleRequest], float], Awaitable[Reply]]
"""Called with (caller's name, requests, seconds). Sends the requests to a batching server, and waits at most these
seconds for its reply."""


@dataclass(eq=False)
class Waiting:
    """A request that has no outcome yet."""

    place: int
    """Its index in the group of requests that came with it."""
    stream: Stream
    requested_at: float
    """When the request was passed to `BatchingClient.sample`, in seconds by the clock of the event loop."""


class BatchingClient:
    """Sends one process's requests to the replica `name`, and hands out their outcomes. Make and use it in one event
    loop. `exchange` sends requests and waits for a reply; once it raises TriremeError, each `sample` raises the same
    error.

    `answer_s`: seconds to wait for the outcome of a request. If `gathers`, requests may wait some milliseconds, so that
    several travel in one call. Otherwise the requests of each `sample` travel immediately, in a call of their own,
    which deterministic runs need.
    """

    def __init__(self, exchange: Exchange, *, name: str, answer_s: float, gathers: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self._exchange = exchange
        self._name = name
        self._answer_s = answer_s
        self._gathers = gathers
        self._caller = uuid.uuid4().hex
        self._waiting: dict[str, Waiting] = {}
        self._queued: list[SampleRequest] = []
        self._calls = 0  # that have no answer yet
        self._timer: asyncio.Handle | None = None  # of the next call
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: TriremeError | None = None

    async def sample(self, requests: Sequence[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        """Sends `requests` and yields (index into `requests`, outcome), once for each request. If the replica becomes
        unusable, yields the outcomes that it still delivered, and then raises the reason."""
        if self._failure:
            raise self._failure
        stream = Stream()
        now = self.loop.time()
        try:
            for place, request in enumerate(requests):
                self._waiting[request.request_id] = Waiting(place, stream, now)
            self._send(requests)
            remaining = len(requests)
            while remaining and (outcomes := await stream.get()):
                remaining -= len(outcomes)
                for outcome in outcomes:
                    yield outcome
            if self._failure:
                raise self._failure
        finally:
            for request in requests:
                self._waiting.pop(request.request_id, None)

    def withdraw(self, names: Sequence[str]) -> list[str]:
        """Ends the requests among `names` that have not yet been sent; each ends as Progress without tokens. Returns
        the other names."""
        queued = {request.request_id for request in self._queued}
        self._end(queued.intersection(names))
        return [name for name in names if name not in queued]

    def _end(self, names: Iterable[str]) -> None:
        for name in names:
            waiting = self._waiting.pop(name, None)
            if waiting:
                waiting.stream.put_nowait([(waiting.place, NOTHING)])

    def _send(self, requests: Sequence[SampleRequest]) -> None:
        self._queued += requests
        idle = not self._calls and self._timer is None
        if idle or not self._gathers or len(self._waiting) < FEW:
            self._call_now()
        else:
            self._call_soon()

    def _call_soon(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(GATHER_S, self._call_now)

    def _call_now(self) -> None:
        """Sends the queued requests in one call. If there are none, makes a call only if requests wait for outcomes and
        no call is under way."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        queued = [request for request in self._queued if request.request_id in self._waiting]
        self._queued = []
        if self._waiting and (queued or not self._calls) and not self._failure:
            self._calls += 1
            self._spawn(self._call(queued))

    async def _call(self, requests: list[SampleRequest]) -> None:
        now = self.loop.time()
        oldest = next((waiting.requested_at for waiting in self._waiting.values()), now)
        left_s = oldest + self._answer_s - now
        try:
            if left_s <= 0:
                raise RoomFailed(f"{self._name} has not answered a request within {self._answer_s:.0f} s")
            reply = await self._exchange(self._caller, requests, left_s)
        except TriremeError as failure:
            reply = Reply(failure=failure)
        except Exception as error:  # else all requests would wait for ever
            reply = Reply(failure=RoomFailed(f"{self._name}, sampling: {type(error).__name__}: {error}"))
        finally:
            self._calls -= 1
        self._hand_out(reply)

    def _hand_out(self, reply: Reply) -> None:
        self._failure = self._failure or reply.failure
        streams: defaultdict[Stream, list[tuple[int, Outcome]]] = defaultdict(list)
        for name, outcome in reply.outcomes:
            waiting = self._waiting.pop(name, None)
            if waiting:  # else nothing waits for it any more
                streams[waiting.stream].append((waiting.place, outcome))
        for stream, outcomes in streams.items():
            stream.put_nowait(outcomes)
        if self._failure:
            for stream in {request.stream for request in self._waiting.values()}:
                stream.put_nowait(None)
        elif self._waiting and not self._calls:
            self._call_soon()

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)
