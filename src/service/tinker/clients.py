"""Clients in the protocol's state, with their sessions, models and samplers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from service.tinker.model_history import ModelHistory
from service.tinker.owners import SERVER, Caller
from service.tinker.promises import Failure, Promise

Ranges = tuple[tuple[int, int], ...]
"""A set of numbers as ranges (first, last), both included, in ascending order."""


def with_numbers(ranges: Ranges, numbers: Iterable[int]) -> Ranges:
    """Returns `ranges` with `numbers` added; adjoining ranges are joined."""
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
    """The number of the request that the trainer runs next for the model."""
    waiting: dict[int, Promise] = field(default_factory=dict)
    blocked: tuple[object, float] = None, 0.0
    """(reason, time): why the model waits at present, and when this reason was first seen."""
    failure: Failure | None = None
    """The outcome of all further requests once the model cannot be trained any more; None: it can be trained."""
    history: ModelHistory = field(default_factory=ModelHistory)
    """The model's newest checkpoint, and the steps that the trainer has done for the model since then."""

    @property
    def ready(self) -> Promise | None:
        """The next request by number, if it has arrived; None if it has not."""
        return self.waiting.get(self.next_seq)

    def waited(self, cause: object, now: float) -> float:
        """Returns how long the model has waited for `cause`, in seconds. The time counts from the first call with this
        cause, and starts again at 0 after a call with another cause."""
        if self.blocked[0] != cause:
            self.blocked = (cause, now)
        return now - self.blocked[1]


@dataclass(eq=False)
class ClientSampler:
    """A client's sampling session: its samples come from the weights `target`."""

    sampler_id: str
    session_id: str
    target: str
    """The name of its weights."""
    retired: Ranges = ()
    """The numbers of the samples whose outcomes were forgotten."""


@dataclass(eq=False)
class ClientSession:
    """A client's session: one run of a client program, with its models and samplers."""

    session_id: str
    beat_s: float
    """When its client last gave a sign of life, in seconds of the server's clock."""
    caller: Caller = SERVER
    """The owner of the client's key. The models of the session load only states that this owner may read."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The client's description of the session."""
    end_reason: str = ""
    """Why the session has ended; "": it has not ended."""
    ended_s: float | None = None
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
