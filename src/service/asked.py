"""The form that a request of every dialect takes inside the service, and that of its answer.

body --dialect--> Asked --front--> Delta, Delta, ..., ServiceAnswer --dialect--> body, or server-sent events
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from trireme.core.types import SampledSequence, SamplingParams, VersionSpan
from trireme.renderers import Message, ToolCall, ToolSpec

COUNT = re.compile("[0-9]{1,18}")
Finish = Literal["stop", "length", "tool_calls"]


class RequestRefused(Exception):
    """A request that is not served. Each dialect writes it in its own error body."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`param`: the part of the body that is refused. `code`: a word for programs. `retry_after_s`: when the same
        request may be served."""
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_after_s = retry_after_s


def count_of(text: str) -> int | None:
    """Returns the number that a client wrote in decimal digits of ASCII; None: it is none, or has too many digits.
    (`str.isdigit` takes digits that `int` refuses, and `int` refuses very long numbers.)"""
    return int(text) if COUNT.fullmatch(text) else None


@dataclass(frozen=True)
class Asked:
    """One request: a conversation to continue, or prompts."""

    model: str
    """The name of the model that was asked for."""
    params: SamplingParams
    """How to sample; its `stop` has token ids alone, its seed is that of the first answer."""
    messages: Sequence[Message] = ()
    """The conversation; empty for prompts."""
    tools: Sequence[ToolSpec] = ()
    """The tools that the model may call."""
    prompts: Sequence[str | Sequence[int]] = ()
    """Texts, or token ids; empty for a conversation."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, and are no part of it."""
    n: int = 1
    """Number of answers to each prompt."""
    logprobs: bool = False
    """The answer tells the log-probability of each of its tokens."""
    token_ids: bool = False
    """The answer tells the token ids of prompts and answers, and the weights of each token."""
    stream: bool = False
    """The answer comes in pieces."""


class Made(Protocol):
    """All that a replica has sampled of an answer so far."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...

    @property
    def logprobs(self) -> npt.NDArray[np.float32]: ...

    @property
    def spans(self) -> tuple[VersionSpan, ...]: ...


@dataclass(frozen=True)
class Delta:
    """The next piece of an answer."""

    choice: int
    """The number of the answer."""
    thinking: str
    """More of its thinking."""
    content: str
    """More of its text."""
    tokens: Sequence[int]
    """The tokens that were sampled since the last piece."""
    logprobs: Sequence[float]
    """Their log-probabilities."""
    version: int
    """The weights that sampled the last of them."""
    prompt_tokens: int
    """Number of tokens of the prompt."""


@dataclass(frozen=True)
class ServiceAnswer:
    """A whole answer."""

    choice: int
    """Its number."""
    prompt: npt.NDArray[np.int32]
    """The token ids of its prompt."""
    sequence: SampledSequence
    """The tokens that were sampled, with the weights of each."""
    content: str
    """Its text without thinking and tool calls."""
    finish: Finish
    """Why it ended."""
    thinking: str = ""
    """Its thinking."""
    tool_calls: Sequence[ToolCall] = ()
    """The tools that it calls."""
    stopped_by: str | None = None
    """The string of the request that ended it, if one did."""
    rest: Delta | None = field(default=None, repr=False)
    """The last piece, in a stream."""
    node: int | None = None
    """Its name in its session, if it is a session's."""

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest and the newest version that sampled a token of it."""
        found = [span.identity.version for span in self.sequence.spans]
        return min(found, default=0), max(found, default=0)
