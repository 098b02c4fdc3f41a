"""The parts of the protocol's state: promises and their outcomes, sessions, models and samplers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.core.datum import ModelInput
from trireme.core.types import SamplingParams

Category = Literal["user", "server"]


class UserError(Exception):
    """A request that was accepted and then found to be wrong. The client is told so when it asks for the result."""


class UnknownId(Exception):
    """An id that was never given out."""


class GoneError(Exception):
    """A thing that was there and is over."""


@dataclass(frozen=True)
class Failure:
    """The outcome of a request that failed."""

    error: str
    """A sentence for the user."""
    category: Category


@dataclass(frozen=True)
class Success:
    """The outcome of a request that succeeded."""

    payload: bytes | dict[str, object]
    """Bytes in protobuf, or an object of JSON."""


Outcome = Success | Failure


@dataclass(frozen=True)
class SampleWork:
    """A prompt, and how to sample from it."""

    prompt: ModelInput
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool
    topk: int


@dataclass
class RetiredNumbers:
    """The numbers of requests whose promises are not kept any more. They are dense, so few numbers tell them all."""

    below: int = 0
    """All numbers below it are retired."""
    above: set[int] = field(default_factory=set)
    """Those beyond it that are."""

    def add(self, number: int) -> None:
        """Retires a number."""
        self.above.add(number)
        while self.below in self.above:
            self.above.remove(self.below)
            self.below += 1

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.above


@dataclass(eq=False)
class Promise:
    """A request that was acknowledged."""

    request_id: str
    session_id: str
    work: object
    """What is to be done, which the state machine does not look into; None once it is done."""
    outcome: Outcome | None = None
    settled_s: float | None = None
    """When its outcome was first seen to be there."""
    given_s: float | None = None
    """When its outcome was first given."""
    forgotten: bool = False
    """True: it had an outcome, which is not kept any more."""

    @property
    def owner_id(self) -> str:
        """The model or the sampler that it belongs to."""
        return self.request_id.rpartition("/")[0]

    @property
    def number(self) -> int:
        """Its number there."""
        return int(self.request_id.rpartition("/")[2])

    @property
    def is_sample(self) -> bool:
        """True: it belongs to a sampler."""
        return self.owner_id.split(":")[-2:-1] == ["sample"]

    def forget(self) -> None:
        """Drops the outcome."""
        self.outcome, self.forgotten = None, True


@dataclass(eq=False)
class ClientModel:
    """A model that a client trains."""

    model_id: str
    session_id: str
    next_seq: int = 0
    """The number of the request that comes next."""
    waiting: dict[int, Promise] = field(default_factory=dict)
    gap: tuple[int, float] | None = None
    """The number of a request that later ones wait for, and when that was seen first."""
    ended: str = ""
    """Why it cannot be trained any more."""
    lined_s: float | None = None
    """When it was first seen to wait for a place while models of its own session have some."""
    origin: str = ""
    """The path of the state with which it began; "": with none. It is known while the model waits for a place."""
    retired: RetiredNumbers = field(default_factory=RetiredNumbers)
    """The requests whose promises are not kept any more."""

    @property
    def ready(self) -> Promise | None:
        """The request that may run."""
        return self.waiting.get(self.next_seq)

    @property
    def refusal(self) -> Failure:
        """The outcome of requests to a model that has ended."""
        return Failure(f"the model {self.model_id} cannot be trained any more: {self.ended}", "user")


@dataclass(eq=False)
class ClientClone:
    """One of the clones of a sampler, which count their samples on their own."""

    retired: RetiredNumbers = field(default_factory=RetiredNumbers)
    """The samples whose promises are not kept any more, counted from 0."""
    dropped: int = 0
    """How many of those that were done first are not listed any more: the client has seen them."""
    completed: deque[str] = field(default_factory=deque)
    """The ids of the samples that were done after those, in that order."""

    def seen(self, cursor: int) -> None:
        """Drops what the client has seen: the `cursor` samples that were done first."""
        while self.completed and self.dropped < cursor:
            self.completed.popleft()
            self.dropped += 1


@dataclass(eq=False)
class ClientSampler:
    """A sampling session: it samples from one set of weights."""

    sampler_id: str
    session_id: str
    target: str
    """The name of its weights."""
    joined: int = 0
    """How many clones have asked for a number."""
    clones: dict[int, ClientClone] = field(default_factory=dict)

    def clone(self, number: int) -> ClientClone:
        """Returns a clone, which is there from its first use on."""
        return self.clones.setdefault(number, ClientClone())


@dataclass(eq=False)
class ClientSession:
    """A client, from its first request to its last."""

    session_id: str
    beat_s: float
    """When it was last heard of."""
    owner: str = ""
    """The name of the key with which it began."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the client said of it."""
    ended_s: float | None = None
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Position:
    """Where a request is that has no outcome yet."""

    queue_state: str
    """`active`, or `paused_capacity`: the places of the trainer belong to other clients."""
    reason: str
    """A sentence for the user."""
