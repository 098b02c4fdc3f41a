"""Answers turns of sessions and of chats. A chat is a request outside of all sessions; it is treated as a session with
one turn, which is not stored.

TurnRequest --place--> PlacedTurn: the answer that the turn continues, its whole prompt, and how to sample
                           |
                           +--sample--> SampledSequence, ... --read--> SampledAnswer, ...
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

from service.places import Places
from service.reading import AnswerReader, MessageReader, TextReader
from service.requests import Finish, RequestRefused, ServedModels, TurnRequest
from service.sessions.branches import TokenIds
from service.sessions.prompts import PROMPT, asked_before, match_ids, prompt_ids, text_behind
from service.sessions.tree import ROOT, Match, SampledAnswer, SessionTree, TurnGiven
from trireme.core.sampler import Sample, SampledPart
from trireme.core.tokenizer import Tokenizer
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, WeightIdentity
from trireme.renderers import Message, Renderer

CHARACTERS = 8
"""Characters per token: few texts have more of them."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PlacedTurn:
    """A turn that is ready to be sampled: its place in the session, and its whole prompt as tokens."""

    request: TurnRequest
    turn: TurnGiven
    """The node of the session's tree after which it stands, and its new messages and tokens; its `answers` are still
    empty."""
    prompt: TokenIds
    """The whole prompt, [T]."""
    params: SamplingParams
    """How to sample, with the seed of the first answer."""
    first_weights: WeightIdentity | None
    """The weights of the first sampled token in the prompt; None: no token of the prompt was sampled."""


@dataclass(frozen=True, eq=False)
class AnsweredTurn:
    """A turn of a session with its prompt and its answers."""

    prompt: TokenIds
    """The whole prompt, [T]."""
    params: SamplingParams
    """How the answers were sampled."""
    answers: tuple[SampledAnswer, ...]
    nodes: tuple[int, ...]
    """The nodes of the answers in the tree of their session."""


OnPart = Callable[[PlacedTurn, int, SampledPart], None]
"""Called with a turn, the number of one of its answers, and all tokens of this answer so far; again and again while the
turn is sampled."""

OnAnswer = Callable[[PlacedTurn, int, SampledSequence], None]
"""Called with a turn, the number of one of its answers, and this answer, directly after the whole answer is sampled."""


class TurnAnswering:
    """Answers turns of sessions and chats: finds the earlier answer that a turn continues, samples the turn, and
    decodes the sampled tokens. `models`: the served model and its names; `places`: limits how many answers are sampled
    at the same time."""

    def __init__(
        self, sample: Sample, models: ServedModels, tokenizer: Tokenizer, renderer: Renderer, places: Places
    ) -> None:
        self.models = models
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.places = places
        self._sample = sample
        self._numbers = itertools.count()

    # ---- the place of a turn

    def match(self, tree: SessionTree, request: TurnRequest) -> tuple[TurnRequest, Match]:
        """Returns (request, match): the request, with token ids added if its prompt is a text, and the answer in `tree`
        that the request continues."""
        if request.text is not None:
            if request.retry:
                retry_ids = asked_before(tree, request.text, request.options, self.tokenizer)
            else:
                retry_ids = None
            if retry_ids is None:
                ids = prompt_ids(tree, request.text, self.tokenizer)
            else:
                ids = retry_ids
            request = replace(request, ids=ids)
        if request.ids is not None:
            return request, match_ids(tree, request.ids)
        return request, tree.match(request.messages, request.tools)

    def place(self, tree: SessionTree, match: Match, request: TurnRequest, params: SamplingParams) -> PlacedTurn:
        """Returns the turn of a request with its whole prompt. Raises RequestRefused if the prompt is empty, too long,
        has token ids that the model does not have, or is refused by the chat format."""
        parent, fresh, messages = self._behind(tree, match, request)
        prompt = tree.joined(parent, fresh)
        # Prompts need tokens that have a text; stop tokens (`check_size`) may be any that the model can sample.
        vocabulary = min(len(self.tokenizer), self.models.vocab_size)
        if not len(prompt):
            raise RequestRefused("an empty prompt; expected at least one token", param=request.param)
        if len(fresh) and (fresh.min() < 0 or fresh.max() >= vocabulary):
            raise RequestRefused(
                f"token ids from {fresh.min()} to {fresh.max()}; expected 0 to {vocabulary - 1}, the vocabulary of "
                "this model: encode the prompt with its tokenizer",
                param=request.param,
            )
        if len(prompt) >= self.models.max_len:
            raise self._too_long(f"{len(prompt)} tokens", request)
        tools = request.tools if match.node == ROOT else ()
        turn = TurnGiven(match.node, parent, messages, tools, fresh, (), request.options)
        return PlacedTurn(request, turn, prompt, params, tree.first_weights(parent))

    def _behind(
        self, tree: SessionTree, match: Match, request: TurnRequest
    ) -> tuple[int, TokenIds, tuple[Message, ...]]:
        """Splits a prompt into the part that `tree` already has and the rest. Returns (node, tokens, messages): the
        node where the part in `tree` ends, the prompt's tokens after that node, and the request's messages after the
        answer that it continues. For a plain prompt (text or token ids), `messages` is a single message with the
        prompt's text after that answer. Raises RequestRefused if the chat format refuses the messages."""
        if request.ids is not None:
            text = text_behind(tree, match, request.text, request.ids, self.tokenizer)
            return match.node, request.ids[match.matched :], ({"role": PROMPT, "content": text},)
        try:
            parent, fresh = tree.render(match, request.messages, request.tools, self.renderer)
        except Exception as error:  # templates and renderers refuse orders of roles, and names, in ways of their own
            raise RequestRefused(f"the chat format refuses these messages: {error}", param="messages") from error
        return parent, fresh, request.messages[match.matched :]

    def check_size(self, request: TurnRequest) -> None:
        """Raises RequestRefused for stop tokens that the model does not have, and for a text that is far too long for
        the model's context: tokenising a very long text would delay all other answers."""
        vocabulary = self.models.vocab_size
        unknown = [token for token in request.params.stop_token_ids if token >= vocabulary]
        if unknown:
            raise RequestRefused(
                f"stop_token_ids with {unknown[0]}; expected ids below {vocabulary}", param="stop_token_ids"
            )
        context = self.models.max_len
        text = request.text or "".join([message["content"] for message in request.messages if "tokens" not in message])
        if len(text) <= CHARACTERS * context:
            return
        # Where messages meet, each may lose a token to its neighbour.
        beginning = self.tokenizer.encode(text[: CHARACTERS * context], add_special_tokens=False)
        if len(beginning) > context + len(request.messages) or len(text) > context * self._longest_token:
            raise self._too_long(f"{len(text):,} characters", request)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()))

    def _too_long(self, size: str, request: TurnRequest) -> RequestRefused:
        return RequestRefused(
            f"a prompt of {size}; this model's maximum context length is {self.models.max_len} tokens, prompt and "
            "answer together (model.max_seq_len)",
            param=request.param,
            code="context_length_exceeded",
        )

    # ---- its answers

    async def sample(
        self, key: str, placed: PlacedTurn, on_part: OnPart | None, on_answer: OnAnswer | None = None
    ) -> list[SampledSequence]:
        """Samples all answers to a turn at the same time. If one answer fails, or the caller is cancelled, all other
        answers are cancelled. `key`: requests with the same key go to the same prefix cache. `on_part` gets parts of
        answers while they are sampled, `on_answer` each whole answer. Raises RequestRefused if an answer waits too long
        for a place, and errors of the sampler and of `on_answer`."""
        ends = () if placed.request.is_prompt else self.renderer.stop_condition()
        params = placed.params
        limit = self.models.max_len - len(placed.prompt)
        stop = (*ends, *params.stop_token_ids, *params.stop_strings)
        params = replace(params, max_tokens=min(params.max_tokens or limit, limit), stop=stop)

        async def one(number: int) -> SampledSequence:
            request = SampleRequest(
                request_id=f"{key}/{next(self._numbers)}",
                prompt=placed.prompt,
                params=params if params.seed is None else replace(params, seed=params.seed + number),
                route_key=key,
                began=placed.first_weights,
            )
            async with self.places:
                sampled = await self._sample(request, partial(on_part, placed, number) if on_part else None)
            if on_answer:
                on_answer(placed, number, sampled)
            return sampled

        return await all_of([one(number) for number in range(placed.request.n)])

    def reader(self, request: TurnRequest, params: SamplingParams) -> AnswerReader:
        """Returns the reader that turns the tokens of an answer into text (for a plain prompt) or into a message."""
        if request.is_prompt:
            return TextReader(self.tokenizer, params.stop_strings)
        return MessageReader(self.renderer, request.tools, params.stop_strings)

    def read(self, sampled: SampledSequence, placed: PlacedTurn) -> SampledAnswer:
        """Returns a sampled sequence as an answer: its tokens, and the assistant's message (text, thinking, tool calls)
        that these tokens contain."""
        reading = self.reader(placed.request, placed.params).read(sampled.tokens.tolist(), True)
        message: Message = {"role": "assistant", "content": reading.content}
        if reading.thinking:
            message["thinking"] = reading.thinking
        if reading.tool_calls:
            message["tool_calls"] = list(reading.tool_calls)
        return SampledAnswer(message, sampled.tokens, sampled.logprobs, sampled.spans, sampled.stop_reason)

    def end_of(self, answer: SampledAnswer, request: TurnRequest, params: SamplingParams) -> tuple[Finish, str | None]:
        """Returns why an answer ended, and the stop string that ended it (None: no stop string did)."""
        tokens = answer.tokens.tolist()
        stopped_by = None
        if params.stop_strings:
            stopped_by = self.reader(request, params).read(tokens, True).stopped_by
        if answer.message.get("tool_calls"):
            return "tool_calls", stopped_by
        by_model = stopped_by or (not request.is_prompt and self.renderer.finished(tokens))
        return "stop" if by_model else answer.stop_reason, stopped_by


async def all_of(works: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """Runs all coroutines `works` at the same time and returns their results in order. If one of them fails, or the
    caller is cancelled, cancels the others and waits for their end before it raises."""
    if len(works) == 1:  # as nearly always: it needs no task
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
