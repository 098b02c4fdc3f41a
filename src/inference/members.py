"""Who is behind a router: the replicas that serve, those that are being drained, and why the others are gone."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from inference.handover import Kept, Outcome, Progress
from trireme.core.errors import ProvenanceError, RoomFailed, TriremeError, WeightsRefused
from trireme.core.sampler import ReplicaStats
from trireme.core.types import SampledSequence, SampleRequest, WeightIdentity
from trireme.core.weights import PublishedWeights, UpdateReport

NAMED = 4
SENSELESS = 4
"""So many answers in a row make no sense, and it is the replica, not what it was asked."""
Value = TypeVar("Value")
log = logging.getLogger(__name__)


class ReplicaClient(Protocol):
    """One replica, as the router calls it. Every call raises TriremeError when the replica fails it or is dead."""

    name: str

    def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        """Yields (index into `requests`, what became of it), each once. Those that the replica gives up because it
        breaks end as Progress, before that is raised."""
        ...

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Progress]:
        """What requests in flight have made beyond the number of tokens that is known of each: {request id: progress},
        without those that have made nothing."""
        ...

    async def update_weights(self, published: PublishedWeights) -> UpdateReport: ...

    async def adopt(self, identity: WeightIdentity) -> None: ...

    async def stats(self) -> ReplicaStats: ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests in flight; they end as Progress."""
        ...


class Moved(Exception):
    """A request is not finished by the replica that it was given to, for `reason`."""

    def __init__(self, reason: TriremeError) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(eq=False)
class Asked:
    """A request on its replica: what that one was asked for, where its answer will come, and what there is of it."""

    request: SampleRequest
    kept: Kept
    future: asyncio.Future[SampledSequence]

    def settle(self, outcome: SampledSequence | Exception) -> None:
        """Gives its caller a result or an error, unless the caller was cancelled or has one already."""
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


@dataclass(eq=False)
class Member:
    """One replica: `given` are the weights that it was ever given, `asked` the requests that it has, by their ids on
    the wire; `senseless` counts answers in a row that made no sense; `gone` says why it is used no more. `tasks` wait
    for it, and end when it is gone."""

    index: int
    client: ReplicaClient
    given: list[WeightIdentity] = field(default_factory=list)
    asked: dict[str, Asked] = field(default_factory=dict)
    report: UpdateReport | None = None
    acknowledged: int | None = None
    updating: bool = False
    draining: bool = False
    followed: bool = False
    senseless: int = 0
    gone: TriremeError | None = None
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.client.name

    def check_given(
        self, says: str, identities: Sequence[WeightIdentity], expected: Sequence[WeightIdentity] | None = None
    ) -> None:
        """Raises ProvenanceError unless all `identities` are among those that it was given."""
        given = self.given if expected is None else expected
        strange = [identity for identity in identities if identity not in reversed(given)]  # it will be a late one
        if strange:
            raise ProvenanceError(
                f"{self.name} {says} weights {', '.join(map(str, strange))} (attempt:version:digest); "
                f"it was given {', '.join(map(str, given[-NAMED:])) or 'none'}"
            )

    def makes_sense(self, made: SampledSequence | Progress, vocab_size: int | None) -> bool:
        """Whether `made` is tokens of the vocabulary (None: it is not known) with finite log-probabilities. Raises
        RoomFailed when it is not, again and again."""
        tokens, logprobs = made.tokens, made.logprobs
        # Ufuncs, without the Python around them. A negative token is a large one without its sign, and a sum is finite
        # if all are: each is looked at once.
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


class Fleet:
    """The members of a router, by number. `patience_s`: how long to wait for one to join when none is left."""

    def __init__(self, clients: Mapping[int, ReplicaClient], patience_s: float) -> None:
        self.members = {index: Member(index, client) for index, client in clients.items()}
        self.failures: dict[int, TriremeError] = {}
        """Of those that have no successor."""
        self._patience_s = patience_s
        self._joined, self._failed = asyncio.Event(), asyncio.Event()
        self._unreported: dict[int, str] = {}

    @property
    def live(self) -> list[Member]:
        return list(self.members.values())

    @property
    def serving(self) -> list[Member]:
        """Those that take requests."""
        return [member for member in self.members.values() if not member.draining]

    @property
    def serves(self) -> bool:
        """Whether anybody takes requests; asked for each of them."""
        for member in self.members.values():  # noqa: SIM110  # `any` takes three times as long
            if not member.draining:
                return True
        return False

    def add(self, member: Member) -> None:
        """In the place of whoever had its number. Members stay in the order of their numbers, whoever came first: in
        deterministic mode it says where a request goes."""
        self.failures.pop(member.index, None)
        self._unreported.pop(member.index, None)
        self.members = dict(sorted({**self.members, member.index: member}.items()))
        self._joined.set()

    async def someone(self) -> list[Member]:
        """Those that take requests; waits for one to join when there is none. Raises when none does, with all that
        failed: WeightsRefused if all of them refused weights, else RoomFailed."""
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while not self.serves:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise self._nobody()
            self._joined.clear()
            try:
                await asyncio.wait_for(self._joined.wait(), left)
            except TimeoutError:
                continue
        return self.serving

    def _nobody(self) -> TriremeError:
        refused = self.failures and all(isinstance(failure, WeightsRefused) for failure in self.failures.values())
        kind = WeightsRefused if refused else RoomFailed
        waited = f", and none joined within {self._patience_s:g} s" if self._patience_s else ""
        reasons = "; ".join(str(self.failures[index]) for index in sorted(self.failures))
        return kind(f"no inference replica is left{waited}: {reasons or 'none has ever joined'}")

    async def call(self, member: Member, work: Awaitable[Value]) -> Value:
        """What `member` answers. Raises why it is gone: as soon as that is known, whether or not it ever answers."""
        task = asyncio.ensure_future(work)
        member.tasks.add(task)
        try:
            await asyncio.wait({task})
            if not task.cancelled():
                return task.result()
        except TriremeError as failure:
            self.fail(member, failure)
            raise
        finally:
            task.cancel()
            member.tasks.discard(task)
        assert member.gone is not None, "whoever cancels its tasks says why"
        raise member.gone

    async def next_failure(self) -> tuple[int, str]:
        """The next member that failed, unless it has a successor by now: its number and the reason."""
        while not self._unreported:
            self._failed.clear()
            await self._failed.wait()
        return self._unreported.popitem()

    def fail(self, member: Member, failure: TriremeError) -> None:
        """Uses `member` no more because of something that it did; `next_failure` tells of it."""
        if self.members.get(member.index) is member:
            log.error("%s. It is used no more; what it was asked goes to others.", failure)
            self._unreported[member.index] = str(failure)
            self._failed.set()
        self.dismiss(member, failure)

    def dismiss(self, member: Member, reason: TriremeError) -> None:
        """Uses `member` no more. Its requests go on elsewhere, with what they have; nothing that it said counts if it
        named weights that it was not given."""
        if member.gone:
            return
        member.gone = reason
        if self.members.get(member.index) is member:
            del self.members[member.index]
            self.failures[member.index] = reason
        for asked in member.asked.values():
            if isinstance(reason, ProvenanceError):
                asked.kept.forget()
            asked.settle(Moved(reason))
        for task in member.tasks - {asyncio.current_task()}:
            task.cancel()
