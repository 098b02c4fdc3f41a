"""Answers requests of every dialect: renders, waits for a place, samples, and reads what was sampled."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from service.asked import Asked, Delta, Finish, Made, RequestRefused, ServiceAnswer
from service.places import Places
from service.reading import AnswerReader, MessageReader, Reading, TextReader, changed, more_of
from trireme.core.errors import BadInput, TriremeError
from trireme.core.types import ModelInput, SampledSequence, SampleRequest
from trireme.renderers import Message, Renderer

CHARACTERS = 8
"""Few texts have so many characters a token."""
RETRY_AFTER_S = 5.0
"""When replicas that do not serve yet, or failed, may serve again: one that has a successor needs some seconds."""
Told = Callable[[Made], None]
Event = Delta | ServiceAnswer
Tokens = npt.NDArray[np.int32]


class ChatSampler(Protocol):
    """The replicas as the service sees them."""

    async def sample(self, request: SampleRequest, told: Told | None = None) -> SampledSequence:
        """Samples one sequence; `told` gets all that there is of it, again and again. Cancelling the caller aborts it.

        Raises TriremeError.
        """


@dataclass(frozen=True)
class ServedModels:
    """The model behind the service, under its names."""

    names: tuple[str, ...]
    """The names under which it can be asked for: `policy`, and that of its commit."""
    max_len: int
    """Longest sequence of prompt and answer, in tokens."""
    vocab_size: int
    """Number of token ids that the model can read; its tokenizer may have more."""

    def check(self, name: str) -> None:
        """Raises RequestRefused for a model that is not there."""
        if name not in self.names:
            there = ", ".join(self.names)
            raise RequestRefused(
                f"the model `{name}` is not loaded; there is {there}", status=404, param="model", code="model_not_found"
            )


class Front:
    """Answers requests. Lives in one event loop."""

    def __init__(
        self, sampler: ChatSampler, models: ServedModels, tokenizer: Any, renderer: Renderer, places: Places
    ) -> None:
        self.models, self.tokenizer, self.places, self.renderer = models, tokenizer, places, renderer
        self._sampler = sampler
        self._open: set[asyncio.Queue[Event | BaseException]] = set()
        self._ended: RequestRefused | None = None

    def end(self, why: str) -> None:
        """Refuses all requests from now on, also those that are being answered."""
        self._ended = RequestRefused(why, status=503, code="service_ended")
        for events in self._open:
            events.put_nowait(self._ended)

    async def answers(self, asked: Asked) -> list[ServiceAnswer]:
        """Returns the answers, all prompts' first ones after each other. Raises RequestRefused."""
        found = [event async for event in self.events(asked) if isinstance(event, ServiceAnswer)]
        return sorted(found, key=lambda answer: answer.choice)

    async def events(self, asked: Asked) -> AsyncGenerator[Event, None]:
        """Yields the pieces of all answers, if they are asked for, and each answer when it is whole. Closing the
        iterator ends what is still sampled. Raises RequestRefused."""
        self.models.check(asked.model)
        self.places.check((1 if asked.messages else len(asked.prompts)) * asked.n)  # before the work for prompts
        prompts = self._prompts(asked)
        if self._ended:
            raise self._ended
        events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._open.add(events)
        name = f"chat-{uuid.uuid4().hex[:12]}"
        tasks = [
            asyncio.create_task(self._put(events, name, asked, prompt, p * asked.n + i, i))
            for p, prompt in enumerate(prompts)
            for i in range(asked.n)
        ]
        left = len(tasks)
        try:
            while left:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                left -= isinstance(event, ServiceAnswer)
                yield event
        finally:
            self._open.discard(events)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _put(
        self, events: asyncio.Queue[Any], name: str, asked: Asked, prompt: Tokens, choice: int, sample: int
    ) -> None:
        try:
            await self._answer(events, name, asked, prompt, choice, sample)
        except BadInput as error:
            events.put_nowait(RequestRefused(str(error)))
        except TriremeError as error:
            again_s = RETRY_AFTER_S
            events.put_nowait(RequestRefused(str(error), status=503, code="replicas_failed", retry_after_s=again_s))
        except Exception as error:
            events.put_nowait(error)

    async def _answer(
        self, events: asyncio.Queue[Any], name: str, asked: Asked, prompt: Tokens, choice: int, sample: int
    ) -> None:
        params = asked.params
        reader = self._reader(asked)
        ends = self.renderer.stop_condition() if asked.messages else ()
        request = SampleRequest(
            request_id=f"{name}/{choice}",
            prompt=prompt,
            params=replace(
                params,
                max_tokens=self._max_tokens(params.max_tokens, len(prompt)),
                stop=(*params.stop_token_ids, *ends, *asked.stop),
                seed=None if params.seed is None else params.seed + sample,
            ),
            route_key=f"{name}/{choice - sample}",
        )
        stream = _Stream(reader, choice, len(prompt)) if asked.stream else None

        def told(made: Made) -> None:
            try:
                if stream and (delta := stream.take(made)):
                    events.put_nowait(delta)
            except Exception as error:  # the router, which calls this, serves other requests too
                events.put_nowait(error)

        async with self.places.one():
            sequence = await self._sampler.sample(request, told if stream else None)
        events.put_nowait(self._whole(asked, choice, prompt, sequence, reader, stream))

    def _whole(
        self,
        asked: Asked,
        choice: int,
        prompt: Tokens,
        sequence: SampledSequence,
        reader: AnswerReader,
        stream: _Stream | None,
    ) -> ServiceAnswer:
        reading = reader.read(sequence.tokens.tolist(), True)
        return ServiceAnswer(
            choice,
            prompt,
            sequence,
            reading.content,
            self.finish(asked, bool(reading.tool_calls), reading.stopped_by, sequence),
            reading.thinking,
            tuple(reading.tool_calls),
            reading.stopped_by,
            stream.rest(sequence, reading) if stream else None,
        )

    def finish(self, asked: Asked, calls: bool, stopped_by: str | None, sequence: SampledSequence) -> Finish:
        """Returns why an answer ended. `calls`: it calls tools; `stopped_by`: the string that ended it, if one did."""
        if calls:
            return "tool_calls"
        ended = asked.messages and self.renderer.ended(sequence.tokens.tolist())
        return "stop" if stopped_by or ended else sequence.stop_reason

    def _reader(self, asked: Asked) -> AnswerReader:
        if asked.messages:
            return MessageReader(self.renderer, asked.tools, asked.stop)
        return TextReader(self.tokenizer, asked.stop)

    def _prompts(self, asked: Asked) -> list[Tokens]:
        self.check_sizes(asked)
        prompts = [self.conversation(asked.messages, asked)] if asked.messages else list(map(self._ids, asked.prompts))
        vocabulary = self.vocabulary
        for prompt in prompts:
            if not len(prompt):
                raise RequestRefused("an empty prompt; expected at least one token", param="prompt")
            if prompt.min() < 0 or prompt.max() >= vocabulary:
                raise RequestRefused(f"token ids beyond the vocabulary of {vocabulary}", param="prompt")
            if len(prompt) >= self.models.max_len:
                raise self._too_long(f"{len(prompt)} tokens", asked)
        return prompts

    def check_sizes(self, asked: Asked) -> None:
        """Refuses tokens that would end an answer but that the model does not have, and texts that are far too long:
        all other answers would wait while they are tokenised. Raises RequestRefused."""
        if unknown := [token for token in asked.params.stop_token_ids if token >= self.models.vocab_size]:
            raise RequestRefused(
                f"stop_token_ids with {unknown[0]}; expected ids below {self.models.vocab_size}",
                param="stop_token_ids",
            )
        most = self.models.max_len
        said = [message["content"] for message in asked.messages if "tokens" not in message]
        whole = "".join(said) if sum(map(len, said)) > CHARACTERS * most else ""
        for text in (whole, *(each for each in asked.prompts if isinstance(each, str))):
            if len(text) <= CHARACTERS * most:
                continue
            # Where messages meet, each may lose a token to its neighbour.
            beginning = self.tokenizer.encode(text[: CHARACTERS * most], add_special_tokens=False)
            if len(beginning) > most + len(asked.messages) or len(text) > most * max(map(len, self._vocabulary)):
                raise self._too_long(f"{len(text):,} characters", asked)

    @property
    def vocabulary(self) -> int:
        """The number of tokens that both the tokenizer and the model know."""
        return min(len(self.tokenizer), self.models.vocab_size)

    @cached_property
    def _vocabulary(self) -> Collection[str]:
        return tuple(self.tokenizer.get_vocab())

    def _too_long(self, size: str, asked: Asked) -> RequestRefused:
        return RequestRefused(
            f"a prompt of {size}; this model's maximum context length is {self.models.max_len} tokens, prompt and "
            "answer together",
            param="messages" if asked.messages else "prompt",
            code="context_length_exceeded",
        )

    def conversation(self, messages: Sequence[Message], asked: Asked) -> Tokens:
        """Returns the prompt for the next message of a conversation. Raises RequestRefused."""
        try:
            return ModelInput(self.renderer.generation_prompt(messages, asked.tools)).tokens
        except Exception as error:  # templates and renderers refuse orders of roles, and names, in ways of their own
            raise RequestRefused(f"the chat format refuses these messages: {error}", param="messages") from error

    def _ids(self, prompt: str | Sequence[int]) -> Tokens:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return np.asarray(ids, np.int64).astype(np.int32) if _fit(ids) else np.array([-1], np.int32)

    def _max_tokens(self, asked: int | None, prompt: int) -> int:
        room = self.models.max_len - prompt
        return room if asked is None else min(asked, room)


def _fit(ids: Sequence[int]) -> bool:
    return all(0 <= each < 2**31 for each in ids)


class _Stream:
    """The pieces of one answer that were sent."""

    def __init__(self, reader: AnswerReader, choice: int, prompt_tokens: int) -> None:
        self._reader, self._choice, self._prompt_tokens = reader, choice, prompt_tokens
        self._thinking = self._content = ""
        self._tokens: list[int] = []

    def take(self, made: Made) -> Delta | None:
        """Returns what is new, None if nothing is."""
        if len(made.tokens) <= len(self._tokens):
            return None
        return self._delta(made, self._reader.read(made.tokens.tolist(), False), False)

    def rest(self, made: Made, reading: Reading) -> Delta:
        """Returns what is new in the whole answer. Raises RequestRefused if it is another one than was sent."""
        return self._delta(made, reading, True)

    def _delta(self, made: Made, reading: Reading, whole: bool) -> Delta:
        tokens, known = made.tokens.tolist(), len(self._tokens)
        if tokens[:known] != self._tokens:
            raise changed()
        thinking = more_of(self._thinking, reading.thinking, whole)
        content = more_of(self._content, reading.content, whole)
        self._thinking, self._content, self._tokens = self._thinking + thinking, self._content + content, tokens
        version = made.spans[-1].identity.version if made.spans else 0
        logprobs = made.logprobs[known:].tolist()
        return Delta(self._choice, thinking, content, tokens[known:], logprobs, version, self._prompt_tokens)
