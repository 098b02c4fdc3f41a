"""Requests and answers inside the service, in one form for all dialects (the APIs of OpenAI and Anthropic).

body --dialect--> TurnRequest, ... --gateway--> Delta, ..., Delta with its ServiceAnswer --dialect--> body, or events
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from service.sessions.branches import TokenIds
from service.sessions.tree import SampledAnswer
from trireme.core.finite_json import to_json
from trireme.core.types import SamplingParams
from trireme.renderers import Message, ToolCall, ToolSpec

COUNT = re.compile("[0-9]{1,19}")
Finish = Literal["stop", "length", "tool_calls"]
USUAL = SamplingParams()


class RequestRefused(Exception):
    """Raised to refuse a request. `service.errors` turns this exception into an error reply, in the format of OpenAI's
    or Anthropic's API. The path of the request decides the format."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`param`: the field of the body that is refused. `code`: a word by which programs recognise the reason.
        `retry_after_s`: seconds after which the same request may be served."""
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


def count_of(text: str) -> int | None:
    """Returns the number that a client wrote in decimal digits (ASCII); None if `text` is no such number, or is too
    long. (`str.isdigit` accepts digits that `int` refuses, and `int` refuses very long numbers.)"""
    if COUNT.fullmatch(text):
        return int(text)
    return None


@dataclass(frozen=True)
class ServedModels:
    """The model that the service serves, and all names by which clients may request it."""

    names: tuple[str, ...]
    """The names by which clients request it: `policy`, and the name of its checkpoint."""
    max_len: int
    """Longest sequence of prompt and answer, in tokens."""
    vocab_size: int
    """Number of token ids that the model can read; its tokenizer may have more."""

    def check(self, name: str) -> None:
        """Raises RequestRefused if `name` is no name of the served model."""
        if name not in self.names:
            names = ", ".join(self.names)
            raise RequestRefused(
                f"the model `{name}` is not loaded; there is {names}", status=404, param="model", code="model_not_found"
            )


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """One prompt to answer: a conversation, or a text, or token ids."""

    messages: tuple[Message, ...] = ()
    """The whole conversation, as the client sent it; empty for a prompt that is text or token ids."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools that the model may call."""
    text: str | None = None
    """A prompt as text."""
    ids: TokenIds | None = None
    """A prompt as token ids. For a prompt that is text, `TurnAnswering.match` adds them."""
    params: SamplingParams = USUAL
    """How to sample, with the seed of the first answer. Clients do not see the strings of `stop`. In a session, only
    `max_tokens`, `stop` and `seed` have an effect: the run decides the rest, because training must know the
    distribution."""
    n: int = 1
    """Number of answers."""
    retry: bool = False
    """True if the client has sent the same request before and has seen no answer (`x-stainless-retry-count` above
    0)."""

    @property
    def is_prompt(self) -> bool:
        """True for a plain prompt, text or token ids (`/v1/completions`); False for a conversation."""
        return self.text is not None or self.ids is not None

    @property
    def param(self) -> str:
        """The name of the body's field that holds the prompt. A refusal of the prompt names this field."""
        if self.is_prompt:
            return "prompt"
        return "messages"

    @property
    def options(self) -> str:
        """The number of answers and the requested max_tokens, stop and seed, as JSON; a retry has the same options."""
        return to_json([self.n, self.params.max_tokens, self.params.stop, self.params.seed])

    @property
    def sameness(self) -> tuple[object, ...]:
        """A value that is equal for a request and its retries, and differs for other requests."""
        if self.ids is None or self.text is not None:
            prompt: object = self.text
        else:
            prompt = self.ids.tobytes()
        return self.messages, self.tools, self.options, prompt


@dataclass(frozen=True)
class ServiceAnswer:
    """A whole answer to a request, in the same form for all APIs. Each module of `service.dialects` builds the reply of
    its API from it."""

    choice: int
    """The number of the answer in the reply."""
    prompt: TokenIds
    """The token ids of its prompt."""
    sequence: SampledAnswer
    """The sampled tokens, the weights that sampled each part of them, and the message that they form."""
    finish: Finish
    """Why it ended."""
    stopped_by: str | None = None
    """The request's stop string that ended the answer; None: no stop string did."""
    node: int | None = None
    """The node of the answer in the tree of its session; None: it belongs to no session."""

    @property
    def content(self) -> str:
        """The text of the answer, without thinking and tool calls."""
        return self.sequence.message["content"]

    @property
    def thinking(self) -> str:
        """The thinking in the answer; "" if there is none."""
        return self.sequence.message.get("thinking", "")

    @property
    def tokens(self) -> list[int]:
        """The sampled tokens of the answer."""
        return self.sequence.tokens.tolist()

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of each sampled token."""
        return self.sequence.logprobs.tolist()

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """The tool calls in the answer."""
        return self.sequence.message.get("tool_calls", ())

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest and the newest version that sampled a token of the answer."""
        versions = [span.identity.version for span in self.sequence.spans]
        return min(versions, default=0), max(versions, default=0)


@dataclass(frozen=True)
class Delta:
    """The next piece of an answer."""

    choice: int
    """The number of the answer."""
    thinking: str
    """The thinking that this piece adds."""
    content: str
    """The text that this piece adds."""
    tokens: Sequence[int]
    """The tokens that were sampled since the last piece."""
    logprobs: Sequence[float]
    """The log-probabilities of these tokens."""
    version: int
    """The version that sampled the newest token of the answer."""
    prompt_tokens: int
    """Number of tokens of the prompt."""
    answer: ServiceAnswer | None = field(default=None, repr=False)
    """The whole answer, if this is the last piece of the answer; else None."""
