"""Sessions without an engine: a renderer whose tokens are letters, and a sampler that says what it is told to.

A sampled letter has another token than a rendered one, so that an answer which was tokenised again shows.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from manual_clock import ManualClock

from service.answering import TurnAnswering
from service.places import Places
from service.requests import ServedModels, TurnRequest
from service.sessions.records import FORMAT
from service.sessions.registry import SessionRegistry
from service.sessions.session import SessionLimits
from service.store import Store
from trireme.core.sampler import OnProgress
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity
from trireme.renderers import Message, Renderer, ToolSpec, TrainOn

END = 1
SAMPLED = 1 << 16
"""Added to the token of a letter that was sampled."""
LIMITS = SessionLimits(turns=100, tokens=100_000, seconds=1000.0, idle_s=100.0, kept_s=500.0)
STORES: dict[Path, Store] = {}
"""The stores that registries hold."""
LOOK: ToolSpec = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}


def message_of(role: str, content: str, **rest: object) -> Message:
    return {"role": role, "content": content, **rest}  # type: ignore[typeddict-item]


def rendered(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def spoken(text: str) -> list[int]:
    """Returns the tokens of an answer, as a policy samples them."""
    return [*(SAMPLED + ord(letter) for letter in text), END]


class Letters(Renderer):
    """Writes each message as `<role>content` and its end. With `strips`, thinking (in parentheses) of answers before
    the last question is left out of prompts."""

    def __init__(self, strips: bool = False) -> None:
        self.strips = strips
        self.whole = 0
        """Prompts that were rendered from their beginning."""

    def generation_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        self.whole += 1
        tokens = rendered("".join(tool["name"] for tool in tools))
        for i, message in enumerate(messages):
            tokens += rendered(f"<{message['role']}>")
            tokens_of_message = list(message["tokens"]) if "tokens" in message else [*rendered(message["content"]), END]
            if self._cut(messages, i):
                tokens_of_message = tokens_of_message[tokens_of_message.index(SAMPLED + ord(")")) + 1 :]
            tokens += tokens_of_message if tokens_of_message[-1] == END else [*tokens_of_message, END]
        return [*tokens, *rendered("<assistant>")]

    def continuation(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int] | None:
        last = max(i for i, message in enumerate(messages) if "tokens" in message)
        if any(self._cut(messages, i) for i in range(len(messages))):
            return None
        complete = messages[last]["tokens"][-1] == END
        rest = "".join(f"<{message['role']}>{message['content']}\x01" for message in messages[last + 1 :])
        return rendered(f"{'' if complete else chr(END)}{rest}<assistant>")

    def _cut(self, messages: Sequence[Message], i: int) -> bool:
        later = any(message["role"] == "user" for message in messages[i + 1 :])
        return self.strips and later and bool(messages[i].get("thinking"))

    def supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn, tools: Sequence[ToolSpec] = ()
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        raise AssertionError("sessions make no supervised examples")

    def stop_tokens(self) -> tuple[int, ...]:
        return (END,)

    def parse_response(self, tokens: Sequence[int], tools: Sequence[ToolSpec] = ()) -> tuple[Message, bool]:
        text = "".join(chr(token - SAMPLED) for token in tokens if token != END)
        thinking, _, content = text.rpartition(")")
        message = message_of("assistant", content, tokens=list(tokens))
        if thinking:
            message["thinking"] = thinking.removeprefix("(")
        return message, tokens[-1] == END


class LetterTokens:
    """A tokenizer whose tokens are letters, and for sampled letters those of `spoken`."""

    def __len__(self) -> int:
        return 1 << 31

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return rendered(text)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token % SAMPLED) for token in tokens if not (skip_special_tokens and token == END))


class ScriptedSampler:
    """Answers with what `say` makes of a request, once the gate is open; keeps its own record. Each sampled token has a
    log-probability that no other has."""

    def __init__(self, say: Callable[[SampleRequest], str] | None = None) -> None:
        self.say = say or (lambda request: f"a{len(self.record)}")
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails: Exception | None = None
        self.version = 3
        self.requests: list[SampleRequest] = []
        self.record: list[tuple[SampleRequest, SampledSequence]] = []
        self.tokens = 0

    async def sample(self, request: SampleRequest, on_progress: OnProgress | None = None) -> SampledSequence:
        self.requests.append(request)
        await self.gate.wait()
        if self.fails:
            raise self.fails
        tokens = spoken(self.say(request))
        numbers = np.arange(self.tokens + 1, self.tokens + len(tokens) + 1, dtype=np.float32)
        logprobs = -numbers / np.float32(1024)
        self.tokens += len(tokens)
        half = len(tokens) // 2
        spans = tuple(
            VersionSpan(WeightIdentity(0, version, f"d{version}"), start, end)
            for version, start, end in ((self.version, 0, half), (self.version + 1, half, len(tokens)))
            if start < end
        )
        sampled = SampledSequence(np.asarray(tokens, np.int32), logprobs, "stop", spans)
        self.record.append((request, sampled))
        return sampled


def registry(
    directory: Path,
    sampler: ScriptedSampler | None = None,
    *,
    renderer: Renderer | None = None,
    limits: SessionLimits = LIMITS,
    clock: Callable[[], float] | None = None,
    boot: str = "boot",
) -> SessionRegistry:
    """Returns a registry that has read its store. The one before it in the directory counts as dead."""
    if dead := STORES.pop(directory, None):
        dead.close()
    STORES[directory] = store = Store(directory, FORMAT, boot)
    models = ServedModels(("policy",), 4096, 1 << 31)
    places = Places(1000, 1000, 1000.0)
    sample = (sampler or ScriptedSampler()).sample
    turns = TurnAnswering(sample, models, LetterTokens(), renderer or Letters(), places)
    opened = SessionRegistry(turns, store, limits, SamplingParams(), clock or ManualClock(), None)
    opened.restore()
    return opened


def turn_request(*messages: Message, retry: bool = False, n: int = 1, tools: Sequence[ToolSpec] = ()) -> TurnRequest:
    return TurnRequest(tuple(messages), tuple(tools), n=n, retry=retry)


def opened_registry(*arguments: Any, **options: Any) -> SessionRegistry:
    """Returns a registry with the open session `s`."""
    opened = registry(*arguments, **options)
    opened.open("s", floor=3)
    return opened
