"""The router over replicas that die, hang, leave and join at any moment: each request is answered exactly once, and
its answer is what a single replica that lives for ever would have given; but for those that two replicas died with.

A token says where it stands in its sequence and which version sampled it, so that a token lost, drawn twice or
attributed to the wrong version is seen.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import virtual_time
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_support import CutOff, in_background, joined, next_incarnation, next_loss, router_of, weights

from inference.batching_client import BatchingClient
from inference.batching_server import BatchingServer, Give
from inference.handover import NOTHING, Outcome, Progress
from inference.messages import Reply, pack_requests
from inference.replica_set.table import Table
from inference.router import MOST_LOSSES
from trireme.core.errors import BadRequest, ReplicaBehind, RoomFailed, TriremeError
from trireme.core.sampler import ReplicaStats
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity
from trireme.core.weights import Drift, PublishedWeights, UpdateReport

TOKEN_S = 0.25
UPDATE_S = 0.5
WATCHED_S = 2.0
"""After so long somebody sees that a replica hangs."""
PATIENCE_S = 1000.0
CUT_S = 5.0
SLOW_S = 40.0
"""Longer than updates wait for a replica in these tests."""
SHARE = 1000
"""A token is SHARE times its place, and the version that sampled it."""


class Slow:
    """A replica that makes a token each TOKEN_S of every request. The first token of a prompt says how long
    prompt and answer become together. Requests and outcomes travel by messages, as to a replica of a run."""

    def __init__(self, index: int) -> None:
        self.name = f"replica {index}"
        self.index = index
        self.identity: WeightIdentity | None = None
        self.sampled: dict[str, list[tuple[int, WeightIdentity]]] = {}
        self.dead: TriremeError | None = None
        self.hangs = self.engine_dead = False
        self.slow_s = 0.0
        self.given_up: set[str] = set()
        self._line: BatchingClient | None = None
        self._desk = BatchingServer(self._begin, self._failure)
        self._tasks: set[asyncio.Task[None]] = set()

    def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        self._line = self._line or BatchingClient(self._exchange, name=self.name, answer_s=PATIENCE_S, gathers=True)
        return self._line.sample(requests)

    async def _exchange(self, caller: str, requests: list[SampleRequest], timeout_s: float) -> Reply:
        await self.alive()
        reply = Reply.unpack(await self._desk.exchange(caller, pack_requests(requests)))
        await self.alive()
        return reply

    def _failure(self) -> TriremeError | None:
        return RoomFailed(f"{self.name}: its engine died") if self.engine_dead else None

    async def _begin(self, requests: list[SampleRequest], give: Give) -> None:
        for request in requests:
            assert self.identity, "asked only once it has weights"
            if request.floor is not None and self.identity.version < request.floor:
                give(request.request_id, ReplicaBehind(f"{self.name} has version {self.identity.version}"))
                continue
            task = asyncio.create_task(self._one(request, give))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _one(self, request: SampleRequest, give: Give) -> None:
        name, prompt = request.request_id, request.prompt
        sampled = self.sampled[name] = []
        while len(prompt) + len(sampled) < prompt[0]:
            await asyncio.sleep(TOKEN_S)
            if self.dead or self.hangs:
                give(name, NOTHING)
                return
            if self.engine_dead or name in self.given_up:
                give(name, progress_of(self.sampled.pop(name), 0))
                return
            assert self.identity
            sampled.append((len(prompt) + len(sampled), self.identity))
        whole = progress_of(self.sampled.pop(name), 0)
        give(name, SampledSequence(whole.tokens, whole.logprobs, "stop", whole.spans))

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Progress]:
        await self.alive()
        progress_by_name = {
            name: progress_of(self.sampled[name], start) for name, start in known.items() if name in self.sampled
        }
        return {name: progress for name, progress in progress_by_name.items() if len(progress.tokens)}

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        slow_s, self.slow_s = self.slow_s, 0.0
        await asyncio.sleep(UPDATE_S + slow_s)
        await self.alive()
        if self.engine_dead:
            raise RoomFailed(f"{self.name}: its engine died")
        self.identity = published.identity
        return UpdateReport(self.index, published.identity, Drift(0.0, 0.0), 0, UPDATE_S)

    async def adopt(self, identity: WeightIdentity) -> None:
        self.identity = identity

    async def stats(self) -> ReplicaStats:
        await self.alive()
        return ReplicaStats(len(self.sampled), 0, 0.0, 0)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.alive()
        self.given_up.update(request_ids)

    async def abort_all(self) -> None:
        await self.abort(list(self.sampled))

    async def alive(self) -> None:
        if self.dead:
            raise self.dead
        if self.hangs:
            await asyncio.Event().wait()


def progress_of(sampled: Sequence[tuple[int, WeightIdentity]], start: int) -> Progress:
    spans: list[VersionSpan] = []
    for i, (_, identity) in enumerate(sampled[start:], start):
        if spans and spans[-1].identity == identity:
            spans[-1] = VersionSpan(identity, spans[-1].start, i + 1)
        else:
            spans.append(VersionSpan(identity, i, i + 1))
    tokens = np.asarray([SHARE * place + identity.version for place, identity in sampled[start:]], np.int32)
    return Progress(start, tokens, -tokens.astype(np.float32), tuple(spans))


@dataclass
class Fleet:
    """Replicas, and those who watch them: what fails, or hangs for WATCHED_S, has a successor `restart_s` later. And
    the sets that own them: one that dies has a successor at once."""

    router: CutOff
    replicas: dict[int, Slow]
    restart_s: float
    replacing: set[int] = field(default_factory=set)
    newest: PublishedWeights | None = None
    tables: list[Table] = field(default_factory=list)
    """All so far."""

    async def watch(self) -> None:
        while True:
            with suppress(TimeoutError):  # the set may have a successor by then
                async with asyncio.timeout(1.0):
                    index = await next_loss(self.router.source, self.replacing)
                    await asyncio.shield(asyncio.ensure_future(self.replace(index)))

    @property
    def floor(self) -> int:
        """The lowest version that a replica serves with, whatever the router has heard."""
        rows = self.tables[-1].rows.values()
        return min((row.acknowledged for row in rows if row.serves and row.acknowledged is not None), default=0)

    async def begin_set_again(self) -> None:
        successor = await next_incarnation(self.router, self.newest, update_s=PATIENCE_S)
        successor.listen(self.tables.append)

    async def update(self, version: int) -> None:
        """Waits until it has ended, in whichever set."""
        self.newest = weights(version)
        in_background(self.router.source.try_update(self.newest))
        while not (self.tables[-1].update and self.tables[-1].update.identity == self.newest.identity):  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def replace(self, index: int) -> None:
        """Starts successors of a replica until one has joined; does nothing if that has begun. Two at the same time
        would leave one that hangs while it joins without a watcher, and no replica manager starts two."""
        if index in self.replacing:
            return
        self.replacing.add(index)
        serves = False
        while not serves:
            await asyncio.sleep(self.restart_s)
            successor = self.replicas[index] = Slow(index)
            with suppress(TriremeError):
                await joined(self.router.source, index, successor)
                serves = True
        self.replacing.discard(index)

    async def event(self, event_name: str, index: int) -> None:
        replica = self.replicas[index]
        if event_name == "dies":
            replica.dead = RoomFailed(f"{replica.name} died")
        elif event_name == "its engine dies":
            replica.engine_dead = True
        elif event_name == "the set dies":
            await self.begin_set_again()
        elif event_name == "a late table comes":
            self.router.take(self.tables[index % len(self.tables)])
        elif event_name == "the router is cut off":
            self.router.cut = True
            await asyncio.sleep(CUT_S)
            self.router.heal()
        elif event_name == "its next update is slow":
            replica.slow_s = SLOW_S
        elif event_name == "leaves":
            await self.router.source.drain(index, 1.0)
            await self.replace(index)
        elif event_name == "hangs":
            replica.hangs = True
            await asyncio.sleep(WATCHED_S)
            replica.dead = RoomFailed(f"{replica.name} was killed")
            if self.replicas[index] is replica:
                self.router.source.leave(index, f"{replica.name} hangs")
                await self.replace(index)


LOSSES = ["dies", "its engine dies", "hangs"]
EVENTS = [
    *(*LOSSES, "leaves", "its next update is slow"),
    *("the set dies", "a late table comes", "the router is cut off"),
]
times = st.floats(0.0, 30.0, allow_nan=False)


@settings(deadline=None, max_examples=100)
@given(
    replicas=st.integers(1, 4),
    requests=st.lists(st.tuples(times, st.integers(3, 60)), min_size=1, max_size=8),
    events=st.lists(st.tuples(times, st.sampled_from(EVENTS), st.integers(0, 3)), max_size=6),
    updates=st.lists(times, max_size=4),
    restart_s=st.floats(0.0, 20.0),
    one_version=st.booleans(),
)
def test_each_request_is_answered_once_and_whole(
    replicas: int,
    requests: list[tuple[float, int]],
    events: list[tuple[float, str, int]],
    updates: list[float],
    restart_s: float,
    one_version: bool,
) -> None:
    lost = sum(kind in LOSSES for _, kind, _ in events)

    async def run() -> None:
        first = {index: Slow(index) for index in range(replicas)}
        router: Any = router_of(first, kind=CutOff, one_version=one_version, patience_s=PATIENCE_S, update_s=PATIENCE_S)
        fleet = Fleet(router, dict(first), restart_s)
        router.source.listen(fleet.tables.append)
        await fleet.update(0)

        async def event(at_s: float, event_name: str, index: int) -> None:
            await asyncio.sleep(at_s)
            await fleet.event(event_name, index)

        async def ask(at_s: float, request: SampleRequest, length: int) -> None:
            await asyncio.sleep(at_s)
            floor = fleet.floor
            try:
                answer = await router.sample(replace(request, floor=floor))
            except BadRequest:
                assert lost >= MOST_LOSSES, "it was in flight at two losses, and has nothing to do with the others"
            else:
                check(answer, length, floor)

        async def update() -> None:
            for version, at_s in enumerate(sorted(updates), 1):
                await asyncio.sleep(max(at_s - asyncio.get_running_loop().time(), 0.0))
                await fleet.update(version)

        background = [
            asyncio.create_task(work)
            for work in (
                fleet.watch(),
                update(),
                *(event(at_s, name, index % replicas) for at_s, name, index in events),
            )
        ]
        await asyncio.gather(
            *(
                ask(at_s, SampleRequest(f"r{i}", (length, 0), SamplingParams(max_tokens=length), "r"), length)
                for i, (at_s, length) in enumerate(requests)
            )
        )
        assert not any(member.requests for member in router._targets.values())
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)

    early = mock.patch.multiple("trireme.core.deadline", TAUGHT_BY=1, LEAST_S=1.0)
    with mock.patch("inference.router.PROGRESS_S", 0.7), early:
        virtual_time.run(run())


def check(answer: SampledSequence, length: int, floor: int) -> None:
    places, versions = np.divmod(answer.tokens, SHARE)
    assert places.tolist() == list(range(2, length)), "each token once, in its place"
    assert (answer.logprobs == -answer.tokens).all()
    assert [span.start for span in answer.spans] == [0, *(span.end for span in answer.spans)][:-1]
    versions_of_tokens = np.concatenate(
        [np.full(span.end - span.start, span.identity.version) for span in answer.spans]
    )
    assert (versions_of_tokens == versions).all()
    # A replica that still takes the newest weights may continue an answer that a replica with them began.
    assert (versions >= floor).all(), "all replicas had that version when the request began"
