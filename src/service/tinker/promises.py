"""The parts of the protocol's state: promises and their outcomes, sessions, models and samplers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Category = Literal["user", "server"]


class UserError(Exception):
    """A request that was accepted and then found to be wrong. The client is told so when it asks for the result."""


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


@dataclass(eq=False)
class Promise:
    """A request that was acknowledged."""

    request_id: str
    session_id: str
    work: object
    """What is to be done, which the state machine does not look into; None once it is done."""
    outcome: Outcome | None = None
    given_s: float | None = None
    """When its outcome was first given."""
    forgotten: bool = False
    """True: it had an outcome, which is not kept any more."""

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

    @property
    def ready(self) -> Promise | None:
        """The request that may run."""
        return self.waiting.get(self.next_seq)

    @property
    def refusal(self) -> Failure:
        """The outcome of requests to a model that has ended."""
        return Failure(f"the model {self.model_id} cannot be trained any more: {self.ended}", "user")


@dataclass(eq=False)
class ClientSampler:
    """A sampling session: it samples from one set of weights."""

    sampler_id: str
    session_id: str
    target: str
    """The name of its weights."""
    joined: int = 0
    """How many clones have asked for a number."""
    completed: dict[int, list[str]] = field(default_factory=dict)
    """The ids of the requests that are done, in that order, by clone."""


@dataclass(eq=False)
class ClientSession:
    """A client, from its first request to its last."""

    session_id: str
    beat_s: float
    """When it was last heard of."""
    ended_s: float | None = None
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
