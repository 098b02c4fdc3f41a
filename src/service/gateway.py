"""Answers requests of every dialect, in sessions and outside of them.

    TurnRequest, ... --registry, or nothing stored--> Delta, Delta, ..., each last one with its answer --> the client

The status of a refusal tells clients whether to try again: 410 says that they must not. It is never 409, because
OpenAI's client tries again after 409.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from service.answering import AnsweredTurn, PlacedTurn, TurnAnswering
from service.errors import RETRY_AFTER_S
from service.keys import ServiceKeys
from service.reading import AnswerPieces
from service.requests import Delta, RequestRefused, ServiceAnswer, TurnRequest
from service.sessions.registry import SessionRegistry
from service.sessions.tree import SampledAnswer, SessionTree
from trireme.core.errors import StorageFailed, TriremeError
from trireme.core.sampler import SampledPart
from trireme.core.types import SampledSequence, WeightIdentity

SWEEP_S = 5.0
Deltas = asyncio.Queue[Delta | Exception]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedSession:
    """A new session, as the reply to its caller describes it."""

    name: str
    key: str
    floor: int


class Gateway:
    """Answers requests, and opens sessions. All its methods run in one event loop. `floor` returns the oldest weights
    that a live replica has. At most `max_open` sessions are open at the same time."""

    def __init__(
        self,
        turns: TurnAnswering,
        registry: SessionRegistry,
        keys: ServiceKeys,
        floor: Callable[[], Awaitable[WeightIdentity]],
        max_open: int,
    ) -> None:
        self.turns = turns
        self.registry = registry
        self._keys = keys
        self._floor = floor
        self._max_open = max_open
        self._open: set[Deltas] = set()
        self._closed: RequestRefused | None = None

    # ---- requests

    async def pieces(
        self,
        turns: Sequence[TurnRequest],
        stream: bool = False,
        session: str = "",
        on_answer: Callable[[ServiceAnswer], None] | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Yields the pieces of all answers to `turns` as they come; without `stream`, one piece for each answer. Calls
        `on_answer` with each whole answer before it yields the answer's last piece. If the iterator is closed early,
        sampling ends, except for turns of a `session` ("": no session), because a retry may ask for their answers.
        Raises RequestRefused, and TriremeError if the sampler or the store fails."""
        new = sum(turn.n for turn in turns if not (session and turn.retry))
        if new:  # a stored answer takes no place
            self.turns.places.check(new)
        for turn in turns:
            self.turns.check_size(turn)
        if self._closed:
            raise self._closed
        deltas = Deltas()
        self._open.add(deltas)
        tasks = []
        pending = 0
        for turn in turns:
            tasks.append(asyncio.create_task(self._answer(deltas, turn, session, pending, stream)))
            pending += turn.n
        try:
            while pending:
                delta = await deltas.get()
                if isinstance(delta, Exception):
                    raise delta
                if delta.answer:
                    pending -= 1
                    if on_answer:
                        on_answer(delta.answer)
                yield delta
        finally:
            self._open.discard(deltas)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, deltas: Deltas, request: TurnRequest, session: str, first: int, stream: bool) -> None:
        """Answers one turn, and puts the pieces of its answers, or an error, into the queue `deltas`. `first`: the
        number of its first answer in the reply; its further answers have the next numbers."""
        pieces: dict[int, AnswerPieces] = {}

        def pieces_of(number: int, turn: PlacedTurn | AnsweredTurn) -> AnswerPieces:
            if number not in pieces:
                reader = self.turns.reader(request, turn.params)
                pieces[number] = AnswerPieces(reader, first + number, len(turn.prompt))
            return pieces[number]

        def on_part(placed: PlacedTurn, number: int, part: SampledPart) -> None:
            try:
                delta = pieces_of(number, placed).next(part)
                if delta:
                    deltas.put_nowait(delta)
            except Exception as error:  # the router, which calls this, serves other requests too
                deltas.put_nowait(error)

        def put(turn: PlacedTurn | AnsweredTurn, number: int, sampled: SampledAnswer, node: int | None) -> None:
            finish, stopped_by = self.turns.end_of(sampled, request, turn.params)
            if stopped_by not in request.params.stop_strings:
                stopped_by = None
            answer = ServiceAnswer(first + number, turn.prompt, sampled, finish, stopped_by, node)
            deltas.put_nowait(pieces_of(number, turn).last(answer))

        def on_answer(placed: PlacedTurn, number: int, sampled: SampledSequence) -> None:
            put(placed, number, self.turns.read(sampled, placed), None)

        try:
            listener = on_part if stream else None
            if session:
                turn = await self.registry.turn(session, request, listener)
                for number, node in enumerate(turn.nodes):
                    put(turn, number, turn.answers[number], node)
            else:  # a session of one turn that is not stored
                tree = SessionTree()
                chat, match = self.turns.match(tree, request)
                placed = self.turns.place(tree, match, chat, chat.params)
                await self.turns.sample(f"chat-{uuid.uuid4().hex[:12]}", placed, listener, on_answer)
        except Exception as error:
            deltas.put_nowait(error)

    def delivered(self, session: str, answers: Sequence[ServiceAnswer]) -> None:
        """Records in the session that the client has received `answers`. If the store fails, only logs this: the
        answers then count as not delivered."""
        try:
            self.registry.delivered(session, [answer.node for answer in answers if answer.node is not None])
        except StorageFailed:
            log.exception("an answer of session %s counts as not delivered", session)

    # ---- sessions

    async def open(self, problem: str = "") -> OpenedSession:
        """Opens a session. `problem`: the name of the agent's task. Raises RequestRefused if too many sessions are
        open, and TriremeError if no replica has weights yet."""
        self._check_open()
        floor = await self._floor()
        self._check_open()  # others were opened meanwhile
        name = uuid.uuid4().hex
        key = self._keys.of_session(name)
        self.registry.open(name, floor.version, problem=problem, attempt=floor.attempt)
        return OpenedSession(name, key, floor.version)

    def _check_open(self) -> None:
        running = sum(session.end_record is None for session in self.registry.book.sessions.values())
        if running >= self._max_open:
            raise RequestRefused(
                f"{running} sessions are open, of at most {self._max_open} (service.sessions.max_open): end some, or "
                "try again later",
                status=429,
                code="sessions_full",
                retry_after_s=RETRY_AFTER_S,
            )

    async def keep_swept(self) -> None:
        """Every SWEEP_S seconds, ends expired sessions and forgets sessions that ended long ago, until this call is
        cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                for name in await self.registry.sweep():
                    session = self.registry.book.sessions.get(name)  # its owner may have forgotten it by now
                    log.warning("session %s was ended: %s", name, session and session.end_record)
            except (TriremeError, RequestRefused):
                log.exception("sessions were not swept")

    async def close(self, reason: str) -> None:
        """Fails all running requests and refuses new ones (503, with `reason`), and closes the store. Open sessions
        stay open in the store."""
        self._closed = RequestRefused(reason, status=503, code="service_ended")
        for deltas in self._open:
            deltas.put_nowait(self._closed)
        await self.registry.close()
