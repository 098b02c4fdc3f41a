"""Promises and their outcomes, and errors that refuse a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from service.requests import RequestRefused
from trireme.core.datum import ModelInput
from trireme.core.types import SamplingParams

Category = Literal["user", "server"]


class UnknownId(RequestRefused):
    """Refuses an id that was never issued to this caller."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=404)


class GoneError(RequestRefused):
    """Refuses, with status 410, a request for something that existed and has ended or was forgotten."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=410)


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
    """The work of a request for samples: the prompt, the number of samples and the sampling parameters."""

    prompt: ModelInput
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool
    topk: int


@dataclass(eq=False)
class Promise:
    """A request that was accepted, with its work and, once it is done, its outcome."""

    request_id: str
    session_id: str
    work: Any
    """The request to run, as a body of `service.tinker.bodies.Work` or as a SampleWork; None once it has an outcome."""
    outcome: Outcome | None = None
    losses: int = 0
    """How often rooms were lost while they worked on it."""
    settled_s: float | None = None
    """When the server first noticed that it has an outcome, in seconds of the server's clock."""
    given_s: float | None = None
    """When the client first got its outcome, in seconds of the server's clock."""
    forgotten: bool = False
    """True if it had an outcome that the server has forgotten."""

    @property
    def owner_id(self) -> str:
        """The id of the model or sampler to which the request was made."""
        return self.request_id.rpartition("/")[0]

    @property
    def number(self) -> int:
        """The number of the request at its model or sampler."""
        return int(self.request_id.rpartition("/")[2])

    @property
    def is_sample(self) -> bool:
        """True if the request was made to a sampler, False if to a model."""
        return self.owner_id.split(":")[-2:-1] == ["sample"]
