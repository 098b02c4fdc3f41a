"""Clients in the protocol's state: their sessions, and the models and samplers of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from service.tinker.model_history import ModelHistory
from service.tinker.owners import SERVER, Caller
from service.tinker.promises import Failure, Promise

Ranges = tuple[tuple[int, int], ...]
"""Numbers, in order: the first and the last of each range without a gap."""


def with_numbers(ranges: Ranges, numbers: Iterable[int]) -> Ranges:
    """Returns `ranges` with `numbers` added, adjoining ranges joined. A range is (first, last), both included."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted([*ranges, *((number, number) for number in numbers)]):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


@dataclass(eq=False)
class ClientModel:
    """A model that a client trains."""

    model_id: str
    session_id: str
    next_seq: int = 0
    """The number of the request that comes next."""
    waiting: dict[int, Promise] = field(default_factory=dict)
    blocked: tuple[object, float] = None, 0.0
    """The reason for its present wait, and when that was first seen."""
    failure: Failure | None = None
    """The outcome of requests once it cannot be trained any more."""
    history: ModelHistory = field(default_factory=ModelHistory)
    """The trainer's steps for it."""

    @property
    def ready(self) -> Promise | None:
        """The next request by number, if it has arrived; None if it has not."""
        return self.waiting.get(self.next_seq)

    def waited(self, cause: object, now: float) -> float:
        """Returns the seconds for which the model has been seen to wait for `cause`; 0 for a new cause."""
        if self.blocked[0] != cause:
            self.blocked = (cause, now)
        return now - self.blocked[1]


@dataclass(eq=False)
class ClientSampler:
    """A sampling session, which samples from the weights `target`."""

    sampler_id: str
    session_id: str
    target: str
    """The name of its weights."""
    joined: int = 0
    """How many clones have asked for a number."""
    retired: Ranges = ()
    """The numbers of samples with retired promises."""
    answers: dict[int, Promise] = field(default_factory=dict)
    """The samples that have their outcome, by their numbers."""

    @property
    def settled_count(self) -> int:
        """The number of samples that have an outcome, retired ones included."""
        return len(self.answers) + sum(last - first + 1 for first, last in self.retired)


@dataclass(eq=False)
class ClientSession:
    """A session: one run of a client program, with its models and samplers."""

    session_id: str
    beat_s: float
    """When it was last heard of."""
    caller: Caller = SERVER
    """The client, who may read the states that its models load."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The client's description of it."""
    end_reason: str = ""
    """Why it has ended."""
    ended_s: float | None = None
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
