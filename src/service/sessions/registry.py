"""The operations on sessions, for the gateway, for environments and for an administrator.

    open -> turn: place, sample, check, store, apply -> delivered -> reward -> end -> export -> forget
              |                    |
              | limit or age       | the caller is gone: the answer is kept for its retry
              v                    v
           SessionClosed        masked, unless a retry or a later message shows that the client has it

Code between two awaits is one step for other callers: a record is stored before it is applied to the tree, and applied
before a caller sees its effect. In memory a session's tree is `book.sessions[name].tree` (`service.sessions.tree`); its
tokens lie in one array for each branch (`service.sessions.branches`). On disk there is no tree: the session's records
(`service.sessions.records`) are the rows of `sessions/store.sqlite` in the run directory (`service.store`), and
`restore` applies them again in order. Sessions of agents that a run plays itself are not on disk (`store` is None).

A turn is sampled in a task of its own, which is not cancelled when its caller goes away: a client that loses its
connection sends the same request again, and gets the same answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from service.answering import AnsweredTurn, OnPart, PlacedTurn, TurnAnswering
from service.requests import USUAL, TurnRequest
from service.sessions.ages import too_old
from service.sessions.checks import SessionClosed, check_request, check_sample
from service.sessions.records import (
    AnswersDelivered,
    RewardGiven,
    SessionEnded,
    SessionOpened,
    SessionRecord,
    TurnAnswered,
    decode,
    encode,
)
from service.sessions.run_history import RunHistory
from service.sessions.session import LOST, AgentSession, RunningTurn, SessionBook, SessionExport, SessionLimits
from service.sessions.tree import ROOT, SampledAnswer
from service.store import Store
from trireme.core.errors import BadInput, ProvenanceError
from trireme.core.sampler import SampledPart
from trireme.core.types import SamplingParams, VersionSpan

DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class SessionRegistry:
    """All sessions of one service. `sampling`: the run's sampling parameters, which apply to all answers. `clock`:
    returns seconds, and continues to count when the service is restarted. `max_steps_off_policy`: the greatest age that
    a session's tokens may have; None: no limit. `history`: the run's attempts so far. They show which versions were
    given up: when an attempt begins with a version, all later versions of earlier attempts are given up. None: no
    attempt is known yet. `store`: keeps sessions across a restart; None: they are lost when this process ends."""

    def __init__(
        self,
        turns: TurnAnswering,
        store: Store | None,
        limits: SessionLimits,
        sampling: SamplingParams,
        clock: Callable[[], float],
        max_steps_off_policy: int | None = None,
        history: RunHistory | None = None,
    ) -> None:
        self._turns = turns
        self._store = store
        self._limits = limits
        self._sampling = sampling
        self._clock = clock
        self._history = history or RunHistory()
        self._max_steps_off_policy = max_steps_off_policy
        self.book = SessionBook()

    def restore(self) -> int:
        """Opens the store and restores the sessions in it; must be called once, before any other method. Returns the
        number of sessions. Raises StorageFailed if the store cannot be opened or read."""
        if self._store is not None:
            lost = self._store.open()
            for row in self._store.rows():
                self.book.apply(decode(row))
            if lost:
                with self._store.transaction():
                    for session in self.book.sessions.values():
                        self._end(session, LOST)
                    self._store.note_boot()
        self._end_given_up()
        return len(self.book.sessions)

    async def close(self) -> None:
        """Cancels the turns that are being sampled, and closes the store. Open sessions stay open in the store."""
        for session in list(self.book.sessions.values()):
            await _cancel(session)
        if self._store is not None:
            self._store.close()

    # ---- verbs of those who own a session

    def open(self, session: str, floor: int, problem: str = "", attempt: int = 0) -> None:
        """Opens a session. `floor`: the lowest version that a live replica has acknowledged; `attempt`: the run's
        attempt that made that version. `problem`: the name of the agent's task."""
        self._write(SessionOpened(session, self._clock(), floor, self._sampling.temperature, problem, attempt))

    def reward(
        self,
        session: str,
        value: float,
        node: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Records a reward for the answer `node`, or for the whole session if `node` is None. The session may have
        ended. A second reward for the same answer, or for the session, replaces the first, so that a client may repeat
        its request. Raises BadInput for an answer that the session does not have, and SessionClosed if there is no such
        session."""
        agent_session = self._session(session)
        if node is not None and not agent_session.is_answer(node):
            raise BadInput(
                f"session {session} was given a reward for answer {node}; expected an answer of this session"
            )
        self._write(RewardGiven(session, self._clock(), float(value), node, dict(metrics or {})))

    async def end(self, session: str, reason: str) -> None:
        """Ends a session, and cancels its turns that are being sampled. Does nothing if it has already ended. Raises
        SessionClosed if there is no such session."""
        agent_session = self._session(session)
        self._end(agent_session, reason)
        await _cancel(agent_session)

    def export(self, session: str) -> SessionExport:
        """Returns the trajectory and the rewards of a session that has ended. Raises BadInput if the session is open or
        its turns still run, and SessionClosed if there is no such session."""
        return self._ended_session(session, "exported").export(self._max_steps_off_policy)

    def forget(self, session: str) -> None:
        """Removes a session that has ended, with its records; its trajectory can no longer be exported. Raises BadInput
        if the session is open or its turns still run, and SessionClosed if there is no such session."""
        self._ended_session(session, "forgotten")
        if self._store is not None:
            self._store.remove(session)
        del self.book.sessions[session]

    async def sweep(self) -> list[str]:
        """Ends each session that has been open, or silent, for longer than the SessionLimits allow, and forgets each
        session that ended long ago. Returns the names of the sessions that this call ended."""
        now = self._clock()
        names = []
        for name, session in list(self.book.sessions.items()):
            if self.book.sessions.get(name) is not session:  # its owner forgot it while another one was being ended
                continue
            if session.end_record is not None:
                if now - max(session.last, session.end_record.at) >= self._limits.kept_s and not session.running:
                    self.forget(name)
                continue
            idle = now - max(session.last, session.heard)
            age = now - session.opened.at
            if age >= self._limits.seconds:
                await self.end(name, f"seconds: it was opened {age:.0f} s ago")
                names.append(name)
            elif idle >= self._limits.idle_s and not session.running:
                await self.end(name, f"idle: nothing was heard of its agent for {idle:.0f} s")
                names.append(name)
        return names

    async def attempt_begins(self, attempt: int, version: int) -> None:
        """Records that attempt number `attempt` of the run begins with the weights `version`. Versions above `version`
        that earlier attempts made are thereby given up. Ends each session whose floor is such a version, or that has
        a token sampled by such a version."""
        self._history.begin(attempt, version)
        for session in self._end_given_up():
            await _cancel(session)

    def _end_given_up(self) -> list[AgentSession]:
        """Ends all sessions that depend on weights that the run has given up (`_given_up`). Returns these sessions."""
        sessions = []
        for session in self.book.sessions.values():
            reason = self._given_up(session)
            if reason:
                self._end(session, reason)
                sessions.append(session)
        return sessions

    def _given_up(self, session: AgentSession) -> str | None:
        """Returns a reason if the session depends on a version that the run has given up: this version is the session's
        floor, or it sampled one of the session's tokens. Returns None if the session depends on no such version."""
        floor = session.opened.attempt, session.opened.floor
        reason = self._history.given_up(*floor) or self._history.of(session.tree.weights)
        return reason and f"stale: {reason}"

    # ---- verbs of agents

    async def turn(self, session: str, request: TurnRequest, on_part: OnPart | None = None) -> AnsweredTurn:
        """Answers a request. A retry gets the answers to its earlier request, even if these are still being sampled.
        Calls `on_part` with parts of new answers. Raises RequestRefused, and errors of the sampler and the store.
        Raises SessionClosed if the session is unknown, or ends before the request is answered."""
        agent_session = self._session(session)
        agent_session.heard = self._clock()
        check_request(request)
        request, match = self._turns.match(agent_session.tree, request)
        if match.echo != ROOT:  # the client has an answer that it sends back
            self._deliver(agent_session, [match.echo])
        agent_session.requests.overruled += self._overrules(request.params)
        if request.retry:
            running = _running_retry(agent_session, request)
        else:
            running = None
        if request.retry:
            stored = agent_session.stored(match, request.options)
        else:
            stored = None
        params = self._params(agent_session, request)
        agent_session.requests.retries += bool(stored or running)
        abandoned = running is not None and not running.callers  # its connection broke just now
        if stored and not abandoned and (running is None or not agent_session.tree.has_any(stored)):
            return _answered(agent_session, params, stored)
        if running is None:
            self._admit(agent_session)
            running = self._begin(
                agent_session, self._turns.place(agent_session.tree, match, request, params), on_part is not None
            )
        return _answered(agent_session, params, await self._wait(agent_session, running, on_part))

    def delivered(self, session: str, nodes: Sequence[int]) -> None:
        """Records that the client has received the answers `nodes`. Does nothing if there is no such session."""
        agent_session = self.book.sessions.get(session)
        if agent_session is not None:
            self._deliver(agent_session, nodes)

    # ---- a turn, step by step

    def _admit(self, session: AgentSession) -> None:
        """Raises SessionClosed if no turn may begin in the session. Before that, ends the session if it has reached a
        limit or depends on weights that the run has given up."""
        if session.end_record is None:
            reason = session.limit_reached(self._limits, self._clock()) or self._given_up(session)
            if reason is not None:
                self._end(session, reason)
        if session.end_record is not None:
            session.requests.refused += 1
            raise SessionClosed(session.opened.session, session.end_record.reason)

    def _begin(self, session: AgentSession, placed: PlacedTurn, stream: bool) -> RunningTurn:
        """Starts a task that samples the answers to a turn, and returns the running turn. `stream`: True if callers get
        parts of the answers."""
        callers: list[OnPart | None] = []
        task = asyncio.ensure_future(self._sample(session, placed, callers, stream))
        running = RunningTurn(placed.request, task, callers)
        session.running.append(running)

        def finish(task: asyncio.Task[tuple[int, ...]]) -> None:
            session.running.remove(running)
            if not task.cancelled():
                task.exception()  # a caller that is gone does not ask for it

        task.add_done_callback(finish)
        return running

    def _params(self, session: AgentSession, request: TurnRequest) -> SamplingParams:
        """Returns the sampling parameters for a request: the run's parameters, with the request's seed, with its stop
        strings and stop tokens added, and with the smaller `max_tokens` of the two."""
        run = self._sampling
        theirs = request.params
        return replace(
            run,
            temperature=session.opened.temperature,
            max_tokens=min((limit for limit in (theirs.max_tokens, run.max_tokens) if limit), default=None),
            stop=(*run.stop_token_ids, *run.stop_strings, *theirs.stop_token_ids, *theirs.stop_strings),
            seed=theirs.seed,
        )

    def _overrules(self, params: SamplingParams) -> bool:
        """Returns True if a request wants another sampling distribution than the run's. The request does not get it,
        because training must know the distribution."""
        return any(getattr(params, n) not in (getattr(USUAL, n), getattr(self._sampling, n)) for n in DISTRIBUTION)

    async def _sample(
        self, session: AgentSession, placed: PlacedTurn, callers: Sequence[OnPart | None], stream: bool
    ) -> tuple[int, ...]:
        """Samples all answers of a turn and records them; returns their nodes. If one answer fails, none is recorded.
        If an answer must not be added to the session (`_unfit`), ends the session and raises SessionClosed."""

        def on_part(placed: PlacedTurn, number: int, part: SampledPart) -> None:
            if not part.spans or self._unfit(session, part.spans):
                return
            for caller in callers:
                if caller:
                    caller(placed, number, part)

        name = session.opened.session
        try:
            sampled = await self._turns.sample(name, placed, on_part if stream else None)
            answers: list[SampledAnswer] = []
            for sequence in sampled:
                check_sample(sequence)
                unfit = self._unfit(session, sequence.spans)
                if unfit:
                    raise ProvenanceError(unfit)
                answers.append(self._turns.read(sequence, placed))
        except ProvenanceError as error:
            reason = f"stale: {error}"
            self._end(session, reason)
            session.requests.refused += 1
            raise SessionClosed(name, reason) from error
        return self._write(TurnAnswered(name, self._clock(), replace(placed.turn, answers=tuple(answers))))

    def _unfit(self, session: AgentSession, spans: Sequence[VersionSpan]) -> str | None:
        """Returns a reason if an answer must not be added to the session: a version that sampled it (`spans`) is below
        the session's floor, or the run has given up such a version, or the answer would make the session too old to
        train on. Returns None if the answer may be added."""
        floor = session.opened.floor
        first = min(span.identity.version for span in spans)
        if first < floor:
            return f"an answer has tokens of version {first}; its session was promised {floor} or later"
        reason = self._history.of(span.identity for span in spans)
        if reason:  # a replica that has no newer weights yet
            return f"an answer is of weights that were given up: {reason}"
        oldest = session.oldest_version
        return too_old(first if oldest is None else oldest, spans[0].identity.version, self._max_steps_off_policy)

    async def _wait(self, session: AgentSession, running: RunningTurn, on_part: OnPart | None) -> tuple[int, ...]:
        """Waits until a running turn is answered, and returns the nodes of its answers; several callers may wait for
        one turn. Raises SessionClosed if the turn was cancelled because its session ended."""
        running.callers.append(on_part)
        try:
            return await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if running.task.cancelled() and session.end_record is not None:
                raise SessionClosed(session.opened.session, session.end_record.reason) from None
            raise
        finally:
            running.callers.remove(on_part)
            session.heard = self._clock()  # an agent whose turn failed after minutes has not been silent for so long

    # ---- records

    def _ended_session(self, session: str, verb: str) -> AgentSession:
        agent_session = self._session(session)
        if agent_session.end_record is None or agent_session.running:
            raise BadInput(f"session {session} is open and cannot be {verb}: end it first")
        return agent_session

    def _session(self, session: str) -> AgentSession:
        if session not in self.book.sessions:
            raise SessionClosed(session, "unknown: it was never opened, or was forgotten after its end")
        return self.book.sessions[session]

    def _write(self, record: SessionRecord) -> tuple[int, ...]:
        """Writes a record to the store, and then applies it to the session. Returns the nodes of the answers in the
        record."""
        if self._store is not None:
            self._store.append(encode(record))
        return self.book.apply(record)

    def _end(self, session: AgentSession, reason: str) -> None:
        if session.end_record is None:
            self._write(SessionEnded(session.opened.session, self._clock(), reason))

    def _deliver(self, session: AgentSession, nodes: Sequence[int]) -> None:
        news = tuple(node for node in nodes if not session.tree.nodes[node].delivered)
        if news:
            self._write(AnswersDelivered(session.opened.session, self._clock(), news))


def _answered(session: AgentSession, params: SamplingParams, nodes: tuple[int, ...]) -> AnsweredTurn:
    tree, answers = session.tree, tuple(session.tree.answer(node) for node in nodes)
    return AnsweredTurn(tree.path_tokens(tree.nodes[nodes[0]].follows), params, answers, nodes)


async def _cancel(session: AgentSession) -> None:
    """Cancels the turns of a session that are being sampled, and waits until they have ended."""
    tasks = [running.task for running in session.running]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _running_retry(session: AgentSession, request: TurnRequest) -> RunningTurn | None:
    """Returns the running turn for the same request as the retry `request`; None if there is no such turn. If there are
    several, returns the one with the fewest waiting callers."""
    same = [running for running in session.running if running.request.sameness == request.sameness]
    return min(same, key=lambda running: len(running.callers), default=None)
