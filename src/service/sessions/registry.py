"""The verbs of sessions, for the front door, for environments and for an administrator.

    open -> turn: match, render, sample, check, journal, apply -> delivered -> reward -> end -> export -> forget
              |                    |
              | limit or age       | the caller is gone: the answer is kept for its retry
              v                    v
           SessionClosed        masked, unless a retry or a later message shows that the client has it

Everything between two awaits is one step: the journal has a record before the tree has it, and the tree before a caller
sees it. A turn is sampled in a task of its own, which a caller that goes away does not cancel: clients that lose their
connection ask again, and mean the same answer.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from service.reading import MessageReader, Reading, TextReader
from service.sessions.ages import too_old
from service.sessions.history import RunHistory
from service.sessions.journal import Replayed
from service.sessions.placing import TurnPlaces
from service.sessions.prompts import TextTokens
from service.sessions.records import (
    AnswersDelivered,
    RewardGiven,
    SessionEnded,
    SessionForgotten,
    SessionOpened,
    SessionRecord,
    TurnAnswered,
)
from service.sessions.session import AgentSession, SessionBook, SessionExport, SessionLimits
from service.sessions.tree import ROOT, Match, SampledAnswer, TurnGiven
from service.sessions.turns import (
    PolicySampler,
    ServedAnswer,
    ServedTurn,
    SessionClosed,
    TurnRequest,
    all_of,
    asked_as,
    check_request,
    check_sample,
)
from trireme.core.errors import BadInput, ProvenanceError
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams
from trireme.renderers import Message, Renderer


class RecordKeeper(Protocol):
    """Keeps records beyond this process, as `SessionJournal` does."""

    def replay(self) -> Replayed:
        """Returns the records that are there."""

    def append(self, record: SessionRecord) -> None:
        """Keeps a record. Raises StorageFailed."""

    def close(self) -> None:
        """Is called once, at the end."""


@dataclass(eq=False)
class _Running:
    """A turn that is being sampled."""

    request: TurnRequest
    task: asyncio.Task[tuple[int, ...]]
    callers: int = 0


class SessionRegistry:
    """All sessions of one service. `sampling`: how all answers are sampled. `clock`: seconds that continue over a
    restart. `max_steps_off_policy`: the bound on the age of tokens (None: nothing is trained)."""

    def __init__(
        self,
        sampler: PolicySampler,
        renderer: Renderer,
        journal: RecordKeeper,
        limits: SessionLimits,
        sampling: SamplingParams,
        max_seq_len: int,
        clock: Callable[[], float],
        max_steps_off_policy: int | None,
        tokenizer: TextTokens,
        vocabulary: int | None = None,
        history: RunHistory | None = None,
    ) -> None:
        """`vocabulary`: the number of tokens that the model can read (None: any). `history`: that of the run's weights
        (None: nothing is ever given up)."""
        self._sampler, self._renderer, self._journal, self._limits = sampler, renderer, journal, limits
        self._sampling, self._max_seq_len = sampling, max_seq_len
        self._clock, self._max_steps_off_policy = clock, max_steps_off_policy
        self._tokenizer, self._history = tokenizer, history or RunHistory()
        self._places = TurnPlaces(renderer, tokenizer, max_seq_len, vocabulary)
        self.book = SessionBook()
        self._running: dict[str, list[_Running]] = {}
        self._numbers = itertools.count()

    def restore(self) -> int:
        """Continues the sessions of the journal; called once, before any other verb. Returns how many there are. Raises
        StorageFailed."""
        for record in self._journal.replay():
            self.book.apply(record)
        self._end_given_up()
        return len(self.book.sessions)

    async def close(self) -> None:
        """Cancels the turns that are being sampled, and closes the journal. Sessions stay as they are."""
        for name in list(self._running):
            await self._cancel(name)
        self._journal.close()

    # ---- verbs of those who own a session

    def open(self, session: str, floor: int, problem: str = "", attempt: int = 0) -> None:
        """Opens a session. `floor`: the lowest version that a live replica has acknowledged; `attempt` made it. Raises
        BadInput for a name that is taken."""
        if session in self.book.sessions:
            raise BadInput(f"a session {session!r} is there already; expected another name")
        self._write(SessionOpened(session, self._clock(), floor, self._sampling.temperature, problem, attempt))

    def reward(
        self,
        session: str,
        value: float,
        node: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Takes a reward for an answer, or for the whole session, ended or not. A second one for the same replaces
        the first, so that a request may be repeated. Raises BadInput, and SessionClosed where there is
        no such session."""
        known = self._known(session)
        if not math.isfinite(value):
            raise BadInput(f"session {session} was given the reward {value}; expected a finite number")
        if node is not None and not known.is_answer(node):
            raise BadInput(f"session {session} was given a reward for answer {node}; expected one that it has")
        self._write(RewardGiven(session, self._clock(), float(value), node, dict(metrics or {})))

    async def end(self, session: str, reason: str) -> None:
        """Ends a session, and cancels its turns that are being sampled. Does nothing where it has ended. Raises
        SessionClosed where there is no such session."""
        self._end(self._known(session), reason)
        await self._cancel(session)

    def export(self, session: str) -> SessionExport:
        """Returns the trajectory and the rewards of a session that has ended. Raises BadInput while turns run, and
        SessionClosed where there is no such session."""
        return self._ended(session, "exported").export(self._max_steps_off_policy)

    def forget(self, session: str) -> None:
        """Removes a session that has ended: its trajectory is kept elsewhere, or not wanted. Raises BadInput while it
        is open, and SessionClosed where there is no such session."""
        self._ended(session, "forgotten")
        self._write(SessionForgotten(session, self._clock()))

    async def sweep(self) -> list[str]:
        """Ends sessions whose agents are gone and those whose time is over; forgets those that ended long ago. Returns
        the names of those that it ended."""
        now, ended = self._clock(), []
        for name, session in list(self.book.sessions.items()):
            if self.book.sessions.get(name) is not session:  # its owner forgot it while another one was being ended
                continue
            if session.ended is not None:
                if now - max(session.last, session.ended.at) >= self._limits.kept_s and not self._running.get(name):
                    self.forget(name)
                continue
            idle, age = now - max(session.last, session.heard), now - session.opened.at
            if age >= self._limits.seconds:
                await self.end(name, f"seconds: it was opened {age:.0f} s ago")
                ended.append(name)
            elif idle >= self._limits.idle_s and not self._running.get(name):
                await self.end(name, f"idle: nothing was heard of its agent for {idle:.0f} s")
                ended.append(name)
        return ended

    async def attempt_begins(self, attempt: int, version: int) -> None:
        """Ends all sessions with weights that the run gives up, as it begins an attempt with a version."""
        self._history.begin(attempt, version)
        for name in self._end_given_up():
            await self._cancel(name)

    def _end_given_up(self) -> list[str]:
        """Ends sessions whose weights are given up. Returns their names."""
        given_up = {name: why for name, session in self.book.sessions.items() if (why := self._given_up(session))}
        for name, why in given_up.items():
            self._end(self.book.sessions[name], why)
        return list(given_up)

    def _given_up(self, session: AgentSession) -> str | None:
        """Returns why the floor of a session, or what it has sampled, is not in the run's history; None if all is."""
        floor = session.opened.attempt, session.opened.floor
        why = self._history.given_up(*floor) or self._history.of(session.tree.weights)
        return why and f"stale: {why}"

    # ---- verbs of agents

    async def turn(self, session: str, request: TurnRequest) -> ServedTurn:
        """Answers a request. Raises SessionClosed, BadTurn, and what the sampler and the journal raise."""
        known = self._known(session)
        known.heard = self._clock()
        check_request(request)
        request, match = self._places.match(known.tree, request)
        self._note_echo(known, match)
        running = self._running_retry(session, request) if request.retry else None
        stored = known.stored(match, asked_as(request)) if request.retry else None
        known.requests.retries += bool(stored or running)
        left = running is not None and not running.callers  # its connection broke just now
        if stored and not left and (running is None or not known.tree.has_any(stored)):
            return self._served(known, stored)
        if running is None:
            self._admit(known)
            running = self._begin(known, match, request)
        return self._served(known, await self._wait(known, running))

    def delivered(self, session: str, turn: ServedTurn) -> None:
        """Takes note that the client has the answers of a turn. Does nothing where there is no such session any more:
        it was exported before this was known."""
        known = self.book.sessions.get(session)
        if known is not None:
            self._deliver(known, [answer.node for answer in turn.answers])

    # ---- a turn, step by step

    def _admit(self, session: AgentSession) -> None:
        """Raises SessionClosed where no turn may begin, and ends a session that has come to a limit."""
        name = session.opened.session
        if session.ended is None:
            running = len(self._running.get(name, ()))
            reason = session.limit_reached(self._limits, self._clock(), running)
            reason = reason or self._given_up(session)
            if reason is not None:
                self._end(session, reason)
        if session.ended is not None:
            session.requests.refused += 1
            raise SessionClosed(name, session.ended.reason)

    def _begin(self, session: AgentSession, match: Match, request: TurnRequest) -> _Running:
        """Renders the prompt of a request, and starts to sample its answers. Raises BadTurn."""
        given, prompt = self._places.given(session.tree, match, request)
        requests = [self._request(session, given.parent, prompt, request, n) for n in range(request.n)]
        name = session.opened.session
        running = _Running(request, asyncio.ensure_future(self._sample(session, given, requests, request)))
        self._running.setdefault(name, []).append(running)
        running.task.add_done_callback(lambda _task: self._forget_running(name, running))
        return running

    def _request(
        self, session: AgentSession, parent: int, prompt: npt.NDArray[np.int32], request: TurnRequest, n: int
    ) -> SampleRequest:
        limits = (request.max_tokens, self._sampling.max_tokens, self._max_seq_len - len(prompt))
        run, ends = self._sampling, () if request.is_prompt else self._renderer.stop_condition()
        params = replace(
            run,
            temperature=session.opened.temperature,
            max_tokens=min(limit for limit in limits if limit),
            stop=(*ends, *run.stop_token_ids, *run.stop_strings, *request.stop),
            seed=None if request.seed is None else request.seed + n,
        )
        return SampleRequest(
            request_id=f"{session.opened.session}/{next(self._numbers)}",
            prompt=prompt,
            params=params,
            route_key=session.opened.session,
            began=session.tree.began(parent),
        )

    async def _sample(
        self, session: AgentSession, given: TurnGiven, requests: Sequence[SampleRequest], request: TurnRequest
    ) -> tuple[int, ...]:
        """Samples all answers of a turn and records them. Where one fails, none is recorded; where one has weights that
        the session may not have, the session ends. Raises SessionClosed then."""
        try:
            sampled = await all_of([self._sampler.sample(each) for each in requests])
            answers = tuple(self._answer(each, request, session.opened.floor) for each in sampled)
        except ProvenanceError as error:
            reason = f"stale: {error}"
            self._end(session, reason)
            session.requests.refused += 1
            raise SessionClosed(session.opened.session, reason) from error
        record = TurnAnswered(session.opened.session, self._clock(), replace(given, answers=answers))
        return self._write(record)

    def _answer(self, sampled: SampledSequence, request: TurnRequest, floor: int) -> SampledAnswer:
        """Returns an answer as the client reads it. Raises RoomFailed and ProvenanceError for one that could not be
        trained on."""
        check_sample(sampled, floor)
        if why := self._history.of(span.identity for span in sampled.spans):  # a replica that has no newer weights yet
            raise ProvenanceError(f"an answer is of weights that were given up: {why}")
        if why := too_old(floor, sampled.spans[0].identity.version, self._max_steps_off_policy):
            raise ProvenanceError(why)
        reading = self._read(sampled.tokens, request)
        message: Message = {"role": "assistant", "content": reading.content}
        if reading.thinking:
            message["thinking"] = reading.thinking
        if reading.tool_calls:
            message["tool_calls"] = list(reading.tool_calls)
        return SampledAnswer(message, sampled.tokens, sampled.logprobs, sampled.spans, sampled.stop_reason)

    def stopped_by(self, tokens: npt.NDArray[np.int32], request: TurnRequest) -> str | None:
        """Returns the string that ended an answer to a request, if one did."""
        return self._read(tokens, request).stopped_by if self._strings(request) else None

    def _read(self, tokens: npt.NDArray[np.int32], request: TurnRequest) -> Reading:
        """Reads an answer to a request as its client does."""
        ends = self._strings(request)
        if request.is_prompt:
            return TextReader(self._tokenizer, ends).read(tokens.tolist(), True)
        return MessageReader(self._renderer, request.tools, ends).read(tokens.tolist(), True)

    def _strings(self, request: TurnRequest) -> list[str]:
        return [end for end in (*self._sampling.stop_strings, *request.stop) if isinstance(end, str)]

    async def _wait(self, session: AgentSession, running: _Running) -> tuple[int, ...]:
        """Waits for a turn that may have other callers too. Raises SessionClosed if it was cancelled."""
        running.callers += 1
        try:
            return await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if running.task.cancelled() and session.ended is not None:
                raise SessionClosed(session.opened.session, session.ended.reason) from None
            raise
        finally:
            running.callers -= 1
            session.heard = self._clock()  # an agent whose turn failed after minutes has not been silent for so long

    def _running_retry(self, session: str, request: TurnRequest) -> _Running | None:
        """Returns the running turn that a retry means: one whose caller is gone, if there is one."""
        same = [running for running in self._running.get(session, ()) if running.request.asks_the_same(request)]
        return min(same, key=lambda running: running.callers, default=None)

    # ---- records

    def _ended(self, session: str, what: str) -> AgentSession:
        known = self._known(session)
        if known.ended is None or self._running.get(session):
            raise BadInput(f"session {session} was to be {what} while it is open; expected one that was ended")
        return known

    def _known(self, session: str) -> AgentSession:
        if session not in self.book.sessions:
            raise SessionClosed(session, "unknown: it was never opened, or was forgotten after its end")
        return self.book.sessions[session]

    def _write(self, record: SessionRecord) -> tuple[int, ...]:
        """Journals a record, and then applies it."""
        self._journal.append(record)
        return self.book.apply(record)

    def _end(self, session: AgentSession, reason: str) -> None:
        if session.ended is None:
            self._write(SessionEnded(session.opened.session, self._clock(), reason))

    def _note_echo(self, session: AgentSession, match: Match) -> None:
        """Takes note that the client has an answer: it sends it back."""
        if match.echo != ROOT:
            self._deliver(session, [match.echo])

    def _deliver(self, session: AgentSession, nodes: Sequence[int]) -> None:
        news = tuple(node for node in nodes if not session.tree.nodes[node].delivered)
        if news:
            self._write(AnswersDelivered(session.opened.session, self._clock(), news))

    def _served(self, session: AgentSession, nodes: Sequence[int]) -> ServedTurn:
        tree, answers = session.tree, []
        for number in nodes:
            node = tree.nodes[number]
            assert node.message is not None
            columns = tree.tokens(number), tree.logprobs(number)
            answers.append(ServedAnswer(number, node.message, *columns, node.spans, node.stop_reason))
        return ServedTurn(tree.path_tokens(tree.nodes[nodes[0]].follows), tuple(answers))

    async def _cancel(self, session: str) -> None:
        """Cancels the turns of a session that are being sampled, and waits until they are."""
        tasks = [running.task for running in self._running.get(session, ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget_running(self, session: str, running: _Running) -> None:
        left = [other for other in self._running[session] if other is not running]
        if left:
            self._running[session] = left
        else:
            del self._running[session]
        if not running.task.cancelled():
            running.task.exception()  # a caller that is gone does not ask for it
