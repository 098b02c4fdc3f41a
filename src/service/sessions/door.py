"""Between the routes and the sessions: turns a dialect's request into a turn of a session, and its answers back.

    Asked --> TurnRequest --registry--> ServedTurn --> [ServiceAnswer] --> the client --> delivered

What the registry refuses becomes a `RequestRefused` with the status that tells clients whether to try again: 410 says
that they must not. It is never 409, which OpenAI's client takes for a reason to try again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from service.asked import Asked, Delta, RequestRefused, ServiceAnswer
from service.front import RETRY_AFTER_S, ChatSampler, Front
from service.keys import ServiceKeys
from service.places import Places
from service.sessions.registry import SessionRegistry
from service.sessions.turns import BadTurn, ServedAnswer, ServedTurn, SessionClosed, TurnRequest, all_of
from trireme.core.errors import BadInput, StorageFailed, TriremeError
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, WeightIdentity

SWEEP_S = 5.0
DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
USUAL = SamplingParams()
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlacedSampler:
    """Samples the answers of sessions in the places of chats: training comes first."""

    sampler: ChatSampler
    places: Places

    async def sample(self, request: SampleRequest) -> SampledSequence:
        """Waits for a place, and samples. Raises RequestRefused, and what the sampler raises."""
        async with self.places.one():
            return await self.sampler.sample(request)


@dataclass(frozen=True)
class OpenedSession:
    """A new session, as those who opened it learn of it."""

    name: str
    key: str
    floor: int


class SessionDoor:
    """All that the routes need of sessions. `floor` tells the oldest weights that a live replica has, `most`: so many
    sessions may be open at the same time."""

    def __init__(
        self,
        registry: SessionRegistry,
        front: Front,
        keys: ServiceKeys,
        sampling: SamplingParams,
        floor: Callable[[], Awaitable[WeightIdentity]],
        most: int,
    ) -> None:
        self.registry = registry
        self._front, self._keys, self._sampling = front, keys, sampling
        self._floor, self._most = floor, most

    async def open(self, problem: str = "") -> OpenedSession:
        """Opens a session. Raises RequestRefused when too many are open, or no replica has weights yet."""
        self._check_open()
        try:
            floor = await self._floor()
        except TriremeError as error:
            raise _later(str(error), "replicas_failed") from error
        self._check_open()  # others were opened meanwhile
        name = uuid.uuid4().hex
        try:
            key = self._keys.of_session(name)
            self.registry.open(name, floor.version, problem=problem, attempt=floor.attempt)
        except TriremeError as error:
            raise refused(error) from error
        return OpenedSession(name, key, floor.version)

    def _check_open(self) -> None:
        running = sum(session.ended is None for session in self.registry.book.sessions.values())
        if running >= self._most:
            raise RequestRefused(
                f"{running} sessions are open, of at most {self._most} (service.sessions.max_open): end some, or try "
                "again later",
                status=429,
                code="sessions_full",
                retry_after_s=RETRY_AFTER_S,
            )

    async def turns(self, session: str, asked: Asked, retry: bool) -> tuple[list[ServedTurn], list[ServiceAnswer]]:
        """Answers a request in its session: a conversation in one turn, prompts in a turn each. Raises
        RequestRefused."""
        self._check(asked)
        requests = _requests(asked, retry)
        if not retry:  # a stored answer takes no place
            self._front.places.check(len(requests) * asked.n)
        self._count_overruled(session, asked.params)
        turns = await all_of([self._turn(session, request) for request in requests])
        pairs = [
            (turn, request, answer) for turn, request in zip(turns, requests, strict=True) for answer in turn.answers
        ]
        return turns, [self._answer(n, *each, asked) for n, each in enumerate(pairs)]

    async def _turn(self, session: str, request: TurnRequest) -> ServedTurn:
        """Raises RequestRefused."""
        try:
            return await self.registry.turn(session, request)
        except TriremeError as error:
            raise refused(error, "prompt" if request.is_prompt else "messages") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            raise _later("the service has ended", "service_ended") from None

    def delivered(self, session: str, turns: Sequence[ServedTurn]) -> None:
        """Takes note that the client has the answers of turns. Where the journal fails they count as not delivered."""
        try:
            for turn in turns:
                self.registry.delivered(session, turn)
        except StorageFailed:
            log.exception("an answer of session %s counts as not delivered", session)

    async def keep_swept(self) -> None:
        """Ends and forgets sessions whose time is over, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                for name in await self.registry.sweep():
                    known = self.registry.book.sessions.get(name)  # its owner may have forgotten it by now
                    log.warning("session %s was ended: %s", name, known and known.ended)
            except TriremeError:
                log.exception("sessions were not swept")

    async def close(self) -> None:
        """Cancels the turns that are being sampled, and closes the journal. Sessions stay as they are."""
        await self.registry.close()

    def _check(self, asked: Asked) -> None:
        """Raises RequestRefused for a request that no session can answer."""
        self._front.models.check(asked.model)
        if any("tokens" in message for message in asked.messages):
            raise RequestRefused(
                "token_ids in a message of a session, which has the tokens of its answers itself; leave them out",
                param="messages",
            )
        self._front.check_sizes(asked)

    def _count_overruled(self, session: str, params: SamplingParams) -> None:
        """Counts a request that asks for another distribution than that of the run, which training has to know."""
        known = self.registry.book.sessions.get(session)
        given = {name: getattr(params, name) for name in DISTRIBUTION}
        strange = [n for n, value in given.items() if value not in (getattr(USUAL, n), getattr(self._sampling, n))]
        if known is not None and strange:
            known.requests.overruled += 1

    def _answer(
        self, number: int, turn: ServedTurn, request: TurnRequest, served: ServedAnswer, asked: Asked
    ) -> ServiceAnswer:
        """Returns an answer in the form that dialects write."""
        sequence = SampledSequence(served.tokens, served.logprobs, served.stop_reason, served.spans)
        calls, stopped_by = (
            tuple(served.message.get("tool_calls", ())),
            self.registry.stopped_by(served.tokens, request),
        )
        thinking, content = served.message.get("thinking", ""), served.message["content"]
        version, tokens = served.spans[-1].identity.version, served.tokens.tolist()
        rest = Delta(number, thinking, content, tokens, served.logprobs.tolist(), version, len(turn.prompt))
        return ServiceAnswer(
            number,
            turn.prompt,
            sequence,
            content,
            self._front.finish(asked, bool(calls), stopped_by, sequence),
            thinking,
            calls,
            stopped_by if stopped_by in asked.stop else None,
            rest if asked.stream else None,
            served.node,
        )


def _requests(asked: Asked, retry: bool) -> list[TurnRequest]:
    """Returns the turns that a request asks for."""
    params = asked.params
    turn = TurnRequest(
        tuple(asked.messages),
        tuple(asked.tools),
        max_tokens=params.max_tokens,
        stop=(*params.stop_token_ids, *asked.stop),
        n=asked.n,
        seed=params.seed,
        retry=retry,
    )
    if asked.messages:
        return [turn]
    return [
        replace(turn, text=prompt) if isinstance(prompt, str) else replace(turn, ids=np.asarray(prompt, np.int32))
        for prompt in asked.prompts
    ]


def refused(error: TriremeError, param: str | None = None) -> RequestRefused:
    """Returns the refusal that a client gets for an error of a verb of sessions. `param`: the part of a turn's body
    that has what is to be answered."""
    if isinstance(error, SessionClosed):
        return _closed(error)
    if isinstance(error, BadTurn):
        too_long = "model.max_seq_len" in str(error)
        return RequestRefused(str(error), param=param, code="context_length_exceeded" if too_long else None)
    if isinstance(error, BadInput):
        return RequestRefused(str(error))
    return _later(str(error), "storage_failed" if isinstance(error, StorageFailed) else "replicas_failed")


def _closed(error: SessionClosed) -> RequestRefused:
    return RequestRefused(str(error), status=410, code="session_closed")


def _later(why: str, code: str) -> RequestRefused:
    return RequestRefused(why, status=503, code=code, retry_after_s=RETRY_AFTER_S)
