"""Requests of agents and their answers, as the front door gives and gets them, and what is refused of both."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trireme.core.errors import ProvenanceError, RoomFailed, TriremeError
from trireme.core.finite_json import to_json
from trireme.core.types import SampledSequence, SampleRequest, StopReason, VersionSpan
from trireme.renderers import Message, ToolSpec

T = TypeVar("T")


class SessionClosed(TriremeError):
    """No turn may begin in a session: it has ended, or there is none of this name. Clients must not try again (410)."""

    def __init__(self, session: str, reason: str) -> None:
        super().__init__(f"session {session} is closed: {reason}")
        self.reason = reason


class BadTurn(TriremeError):
    """A request that cannot be sampled as it is, whatever the session (400)."""


class PolicySampler(Protocol):
    """The part of `trireme.core.sampler.Sampler` that sessions use."""

    async def sample(self, request: SampleRequest) -> SampledSequence:
        """Samples one sequence. Raises RoomFailed when no replica can finish it."""


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """A request of an agent. How the policy is sampled is the run's to say, as training has to know it."""

    messages: tuple[Message, ...] = ()
    """The whole conversation, as the client has it."""
    tools: tuple[ToolSpec, ...] = ()
    text: str | None = None
    """A prompt in place of a conversation, as text."""
    ids: npt.NDArray[np.int32] | None = None
    """A prompt in place of a conversation, as token ids; of one that is text, they are found in its session."""
    max_tokens: int | None = None
    """None: as many as there is room for."""
    stop: tuple[int | str, ...] = ()
    """Ends an answer, in addition to the renderer's own ends. Clients do not see the strings."""
    n: int = 1
    """So many answers are sampled."""
    seed: int | None = None
    """That of the first answer."""
    retry: bool = False
    """The client has asked for the same before, and has seen no answer (`x-stainless-retry-count` above 0)."""

    @property
    def is_prompt(self) -> bool:
        """True: it is no conversation, but a prompt (`/v1/completions`)."""
        return self.text is not None or self.ids is not None

    def asks_the_same(self, other: TurnRequest) -> bool:
        """Returns True if a retry of `other` may be this one."""
        if (self.messages, self.tools, asked_as(self)) != (other.messages, other.tools, asked_as(other)):
            return False
        if self.text is not None and other.text is not None:
            return self.text == other.text
        if self.ids is None or other.ids is None:
            return self.ids is other.ids
        return np.array_equal(self.ids, other.ids)


@dataclass(frozen=True, eq=False)
class ServedAnswer:
    """One answer of a turn."""

    node: int
    """Its name in the session, for its reward."""
    message: Message
    tokens: npt.NDArray[np.int32]
    """[T]."""
    logprobs: npt.NDArray[np.float32]
    """[T]."""
    spans: tuple[VersionSpan, ...]
    stop_reason: StopReason


@dataclass(frozen=True, eq=False)
class ServedTurn:
    """The answers to a request."""

    prompt: npt.NDArray[np.int32]
    """The whole prompt, [T]."""
    answers: tuple[ServedAnswer, ...]


def check_request(request: TurnRequest) -> None:
    """Raises BadTurn for a request that no session can answer."""
    if not request.is_prompt and (not request.messages or request.messages[-1]["role"] == "assistant"):
        last = request.messages[-1]["role"] if request.messages else "none"
        raise BadTurn(f"the last message has the role {last}; expected a message that the assistant is to answer")
    if request.n < 1:
        raise BadTurn(f"n = {request.n}; expected at least 1")


def asked_as(request: TurnRequest) -> str:
    """Returns how the answers to a request are to be sampled; a retry asks for the same."""
    return to_json([request.n, request.max_tokens, request.stop, request.seed])


def check_sample(sampled: SampledSequence, floor: int) -> None:
    """Raises RoomFailed for an answer that cannot be trained on, ProvenanceError for one of too old weights."""
    bounds = [0, *(span.end for span in sampled.spans)]
    whole = [span.start for span in sampled.spans] == bounds[:-1] and bounds[-1] == len(sampled.tokens)
    finite = math.isfinite(np.add.reduce(sampled.logprobs))
    if not whole or not 0 < len(sampled.tokens) == len(sampled.logprobs) or not finite:
        raise RoomFailed(
            f"the sampler returned {len(sampled.tokens)} tokens, {len(sampled.logprobs)} log-probabilities and the "
            f"version spans {sampled.spans}; expected as many of both, at least one, all finite, covered in order"
        )
    if (oldest := min(span.identity.version for span in sampled.spans)) < floor:
        raise ProvenanceError(f"an answer has tokens of version {oldest}; its session was promised {floor} or later")


async def all_of(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of all works, which run at the same time. Where one fails, or the caller is cancelled, the
    others end first."""
    if len(works) == 1:  # as nearly always: it needs no task
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
