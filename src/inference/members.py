"""The replicas behind a router: those that serve, those that are being drained, and why the others are gone."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from inference.handover import Handover, Outcome, Progress
from trireme.core.errors import ProvenanceError, RoomFailed, TriremeError, WeightsGone, WeightsRefused
from trireme.core.sampler import ReplicaStats
from trireme.core.transport import Offer
from trireme.core.types import SampledSequence, SampleRequest, WeightIdentity
from trireme.core.weights import PublishedWeights, UpdateReport

NAMED = 4
TOUCHED_S = 0.05
"""A replica that is lost sooner after it was given a request was dead before: replicas of a node die together."""
SENSELESS = 4
"""After this many senseless answers in a row the replica has failed; fewer may be due to the requests."""
Value = TypeVar("Value")
log = logging.getLogger(__name__)


class ReplicaClient(Protocol):
    """One replica, as the router calls it. Every call raises TriremeError when the replica fails it or is dead."""

    name: str

    def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        """Yields (index into `requests`, how it ended), each once. Requests that the replica gives up because it breaks
        end as Progress, before that is raised."""

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Progress]:
        """Returns {request id: what it has made beyond the number of tokens that is known}, for requests in flight that
        have made something."""

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        """Raises WeightsGone, and has changed nothing, when the bytes are nowhere any more."""

    async def offer(self, offer: Offer) -> None:
        """Returns when the replica is ready to receive what is offered. That it raises does not mean that it is
        broken."""

    async def adopt(self, identity: WeightIdentity) -> None: ...

    async def load_adapter(self, name: str, published: PublishedWeights) -> None:
        """Returns when requests may name the adapter."""

    async def drop_adapter(self, name: str) -> None: ...

    async def stats(self) -> ReplicaStats: ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests in flight; they end as Progress."""


class HandoverNeeded(Exception):
    """The replica does not finish the request, for `reason`; another one is to. `lost`: it failed while it had the
    request, which may be the cause."""

    def __init__(self, reason: TriremeError, *, lost: bool = False) -> None:
        self.reason = reason
        self.lost = lost


@dataclass(eq=False, slots=True)
class RoutedRequest:
    """A request on its replica."""

    request: SampleRequest
    handover: Handover
    """All that the request has so far."""
    future: asyncio.Future[SampledSequence]
    """Where the caller waits for the answer."""
    since: float
    """When it was given to the replica, by the clock of the event loop."""

    def settle(self, outcome: SampledSequence | Exception) -> None:
        """Gives the caller a result or an error, unless it was cancelled or has one already."""
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


@dataclass(eq=False)
class Member:
    """One replica behind a router."""

    index: int
    client: ReplicaClient
    given: list[WeightIdentity] = field(default_factory=list)
    """All weights that it was ever given."""
    adapters: set[str] = field(default_factory=set)
    """The names of the adapters that it was given beside them."""
    requests: dict[str, RoutedRequest] = field(default_factory=dict)
    """The requests that it has, by their ids on the wire."""
    report: UpdateReport | None = None
    acknowledged: int | None = None
    """The version that it has acknowledged."""
    updating: bool = False
    behind: bool = False
    """It does not have the newest weights, and an update has not waited for it: it gets no requests until it has."""
    joining: bool = False
    """It has never served."""
    rounds: int = 0
    """How often it has begun to take weights since it served last."""
    catching_up: asyncio.Task[None] | None = None
    """Brings it to the newest weights."""
    stranded: WeightsGone | None = None
    """Why it is behind until the next update, which waits for it: the newest weights can be had nowhere any more."""
    asked: asyncio.Task[TriremeError | None] | None = None
    """Asks it whether it is ready for what was offered; None: there is no such question without an answer."""
    draining: bool = False
    followed: bool = False
    """A task asks it for progress."""
    senseless: int = 0
    """Number of senseless answers in a row."""
    gone: TriremeError | None = None
    """Why it is used no more."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """They wait for it, and end when it is gone."""

    @property
    def name(self) -> str:
        return self.client.name

    @property
    def serves(self) -> bool:
        """It takes requests."""
        return not (self.behind or self.draining or self.gone)

    def check_given(
        self, says: str, identities: Sequence[WeightIdentity], expected: Sequence[WeightIdentity] | None = None
    ) -> None:
        """Raises ProvenanceError unless all `identities` are among the weights that it was given."""
        given = self.given if expected is None else expected
        strange = [identity for identity in identities if identity not in reversed(given)]  # it will be a late one
        if strange:
            raise ProvenanceError(
                f"{self.name} {says} weights {', '.join(map(str, strange))} (attempt:version:digest); "
                f"it was given {', '.join(map(str, given[-NAMED:])) or 'none'}"
            )

    def makes_sense(self, made: SampledSequence | Progress, vocab_size: int | None) -> bool:
        """Tells whether `made` is tokens of the vocabulary (None: not known) with finite log-probabilities. Raises
        RoomFailed when it is not for the `SENSELESS`th time in a row."""
        tokens, logprobs = made.tokens, made.logprobs
        # Ufuncs, without the Python around them. A negative token is a large one without its sign, and a sum is finite
        # if all are: one pass over each.
        known = not len(tokens) or np.maximum.reduce(tokens.view(np.uint32)) < (vocab_size or 2**31)
        if known and math.isfinite(np.add.reduce(logprobs)) and len(logprobs) == len(tokens):
            self.senseless = 0
            return True
        self.senseless += 1
        if self.senseless >= SENSELESS:
            finite = np.isfinite(logprobs).sum()
            raise RoomFailed(
                f"{self.name} gave {SENSELESS} answers in a row that make no sense: the last one has {len(tokens)} "
                f"tokens ({tokens[:NAMED].tolist()} ..) and {finite} finite log-probabilities; expected as many of "
                f"both, and tokens of a vocabulary of {vocab_size}"
            )
        return False


class Members:
    """The members of a router, by number."""

    def __init__(self, clients: Mapping[int, ReplicaClient], patience_s: float) -> None:
        """`patience_s`: how long to wait for a replica to join when none is left."""
        self.by_index = {index: Member(index, client) for index, client in clients.items()}
        self.adapters: dict[str, PublishedWeights] = {}  # that all members have beside the weights of updates
        self._failures: dict[int, TriremeError] = {}  # of those without a successor
        self._patience_s = patience_s
        self._changed, self._failed = asyncio.Event(), asyncio.Event()
        self._unreported: dict[int, str] = {}

    @property
    def live(self) -> list[Member]:
        return list(self.by_index.values())

    @property
    def serving(self) -> list[Member]:
        """The members that take requests."""
        return [member for member in self.by_index.values() if member.serves]

    @property
    def any_serves(self) -> bool:
        """Some member takes requests. Checked for each request, so it is written for speed."""
        for member in self.by_index.values():  # noqa: SIM110  # `any` takes three times as long
            if member.serves:
                return True
        return False

    def add(self, member: Member) -> None:
        """Puts `member` in the place of its number, to serve once `enter` is called. Members stay in the order of their
        numbers, whenever they came: in deterministic mode it decides where a request goes."""
        member.behind = member.joining = True
        self.by_index = dict(sorted({**self.by_index, member.index: member}.items()))

    def enter(self, member: Member) -> None:
        """Lets `member`, which has the newest weights, serve."""
        self._failures.pop(member.index, None)
        self._unreported.pop(member.index, None)
        member.behind, member.joining, member.stranded, member.rounds = False, False, None, 0
        self._changed.set()

    def strand(self, member: Member, gone: WeightsGone) -> None:
        """Leaves `member` behind until the next update."""
        log.warning("%s. It gets no requests until the next update, which brings it newer weights.", gone)
        member.behind, member.stranded = True, gone
        self._changed.set()

    async def wait_for_serving(self) -> list[Member]:
        """Returns the members that take requests. When there is none, waits for those that take weights, and for
        others to join. Raises, with all failures, when none comes: WeightsRefused if all members refused weights, else
        RoomFailed; and WeightsGone at once where only the next update brings one."""
        with suppress(TimeoutError):
            while not self.any_serves:
                self._changed.clear()
                behind = [member for member in self.live if member.behind and not member.draining]
                if behind and all(member.stranded for member in behind):
                    raise WeightsGone(f"no inference replica has the newest weights: {behind[0].stranded}")
                async with asyncio.timeout(None if behind else self._patience_s):
                    await self._changed.wait()
        if serving := self.serving:
            return serving
        refused = self._failures and all(isinstance(failure, WeightsRefused) for failure in self._failures.values())
        kind = WeightsRefused if refused else RoomFailed
        waited = f", and none joined within {self._patience_s:g} s" if self._patience_s else ""
        reasons = "; ".join(str(self._failures[index]) for index in sorted(self._failures))
        raise kind(f"no inference replica is left{waited}: {reasons or 'none has ever joined'}")

    async def call(self, member: Member, work: Awaitable[Value]) -> Value:
        """Returns the answer of `member`. Raises why it is gone as soon as that is known, even if it never answers. All
        that it raises itself makes it gone but WeightsGone, for which it can do nothing."""
        task = asyncio.ensure_future(work)
        member.tasks.add(task)
        try:
            await asyncio.wait({task})
            if not task.cancelled():
                return task.result()
        except WeightsGone:
            raise
        except TriremeError as failure:
            self.fail(member, failure)
            raise
        finally:
            task.cancel()
            member.tasks.discard(task)
        assert member.gone is not None, "tasks are cancelled only when the member is gone"
        raise member.gone

    async def next_failure(self) -> tuple[int, str]:
        """Waits for the next member that failed and has no successor yet; returns its number and the reason."""
        while not self._unreported:
            self._failed.clear()
            await self._failed.wait()
        return self._unreported.popitem()

    def fail(self, member: Member, failure: TriremeError) -> None:
        """Dismisses `member` because of something that it did; `next_failure` reports it."""
        if self.by_index.get(member.index) is member and not member.joining:
            log.error("%s. It is used no more; its requests go to other replicas.", failure)
            self._unreported[member.index] = str(failure)
            self._failed.set()
        self.dismiss(member, failure)

    def dismiss(self, member: Member, reason: TriremeError) -> None:
        """Uses `member` no more. Other replicas finish its requests from what they have; without what it reported, if
        it named weights that it was not given."""
        if member.gone:
            return
        member.gone = reason
        if self.by_index.get(member.index) is member:
            del self.by_index[member.index]
            if not member.joining:
                self._failures[member.index] = reason
        self._changed.set()
        works = type(reason) is RoomFailed and not (member.draining or member.updating)
        for routed in member.requests.values():
            lost = works and routed.future.get_loop().time() - routed.since >= TOUCHED_S
            if isinstance(reason, ProvenanceError):
                routed.handover.forget_last_replica()
            routed.settle(HandoverNeeded(reason, lost=lost))
        for task in member.tasks - {asyncio.current_task()}:
            task.cancel()
