"""The promises of the protocol's state, and those whom they belong to: sessions, and their models and samplers."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from service.asked import count_of
from service.tinker.clients import ClientModel, ClientSampler, ClientSession, with_numbers
from service.tinker.promises import GoneError, Outcome, Promise, UnknownId
from service.tinker.rows import Change, promise_row, sampler_row, session_row, work_key, work_row
from trireme.core.errors import StorageFailed

KEPT_S = 600.0
"""Seconds for which an outcome is kept after it was given, as the answer may not have arrived, or after the session."""
UNASKED_S = 3600.0
"""Seconds for which an outcome is kept that its client does not ask for."""
CLONE = 1_000_000_000
"""A clone of a sampler numbers its samples from this times its own number."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class PromiseBook:
    """All sessions, all promises that are kept, and the numbers of those that are not any more."""

    write: Callable[[Sequence[Change]], None] = lambda changes: None
    """Makes changes durable before they are made here. Raises StorageFailed; then nothing is done."""
    sessions: dict[str, ClientSession] = field(default_factory=dict)
    models: dict[str, ClientModel] = field(default_factory=dict)
    samplers: dict[str, ClientSampler] = field(default_factory=dict)
    _promises: dict[str, Promise] = field(default_factory=dict)
    _settled: list[Promise] = field(default_factory=list)

    # ---- sessions

    def begin_session(
        self, session_id: str, now: float, owner: str = "", metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Begins a session of the key `owner`."""
        session = ClientSession(session_id, now, owner, metadata or {})
        self.write([session_row(session)])
        self.sessions[session_id] = session

    def tell(self, session_id: str, told: Mapping[str, Any]) -> None:
        """Notes more of what a client says of its session. Raises UnknownId."""
        if (session := self.sessions.get(session_id)) is None:
            raise UnknownId(f"the session {session_id!r}")
        metadata = {**session.metadata, **told}
        self.write([session_row(replace(session, metadata=metadata))])
        session.metadata = metadata

    def session(self, session_id: str) -> ClientSession:
        """Returns a session that has not ended. Raises UnknownId, GoneError."""
        if (session := self.sessions.get(session_id)) is None:
            raise UnknownId(f"the session {session_id!r}; expected one that create_session gave since the server began")
        if session.ended_s is not None:
            raise GoneError(f"the session {session_id!r} has ended; begin another one with a new ServiceClient")
        return session

    def beat(self, session_id: str, now: float) -> None:
        """Notes that the client of a session is there. Raises UnknownId, GoneError."""
        self.session(session_id).beat_s = now

    def heard(self, promise: Promise, now: float) -> None:
        """Notes that a client asked for something of a model. Samplers may be used by other processes than its own."""
        if not promise.is_sample and (session := self.sessions.get(promise.session_id)):
            session.beat_s = now

    # ---- promises

    def _accept(self, promise: Promise, *more: Change) -> Promise:
        """Keeps a new promise. `more`: what is committed together with it."""
        work = [] if promise.outcome else [work_row(promise)]
        self.write([*more, promise_row(promise), *work])
        self._promises[promise.request_id] = promise
        if promise.outcome:
            self._settled.append(promise)
        return promise

    def retire(self, promises: Sequence[Promise]) -> None:
        """Forgets promises that have their outcomes; their numbers are kept, so that they are never done again. Where
        the store has no room for that, nothing is forgotten."""
        if not promises:
            return
        numbers: dict[str, list[int]] = defaultdict(list)
        for promise in promises:
            if promise.is_sample:
                numbers[promise.owner_id].append(promise.number)
        retired = {each: with_numbers(self.samplers[each].retired, numbers[each]) for each in numbers}
        samplers = [sampler_row(replace(self.samplers[each], retired=retired[each])) for each in retired]
        try:
            self.write([*samplers, *(promise.request_id for promise in promises)])
        except StorageFailed:
            log.exception("%d outcomes that were given could not be removed", len(promises))
            return
        for promise in promises:
            promise.outcome = None
            promise.forgotten = True
            del self._promises[promise.request_id]
        for sampler_id in retired:
            sampler = self.samplers[sampler_id]
            sampler.retired = retired[sampler_id]
            for number in numbers[sampler_id]:
                del sampler.answers[number]

    def _is_retired(self, owner_id: str, seq: int) -> bool:
        """Tells whether request `seq` of a model or a sampler was done, where no promise of it is kept."""
        if model := self.models.get(owner_id):
            return seq < max(model.next_seq, 1)
        return any(first <= seq <= last for first, last in self.samplers[owner_id].retired)

    def promises(self) -> list[Promise]:
        """Returns all promises that are kept, in the order in which they were made."""
        return list(self._promises.values())

    def _known(self, owner_id: str, seq: int) -> Promise | None:
        """Returns the promise of a request that was accepted before. One that is retired has a forgotten one."""
        request_id = f"{owner_id}/{seq}"
        if promise := self._promises.get(request_id):
            return promise
        return Promise(request_id, "", None, forgotten=True) if self._is_retired(owner_id, seq) else None

    def settle(self, promise: Promise, outcome: Outcome) -> None:
        """Gives a promise its outcome."""
        sampler = self.samplers.get(promise.owner_id)
        place = sampler.done if sampler else 0
        self.write([promise_row(replace(promise, outcome=outcome, place=place)), work_key(promise.request_id)])
        promise.place = place
        if sampler:
            sampler.answers[promise.number] = promise
        self._has_outcome(promise, outcome)

    def _has_outcome(self, promise: Promise, outcome: Outcome) -> None:
        promise.outcome = outcome
        promise.work = None
        self._settled.append(promise)

    def lose(self, promise: Promise) -> int:
        """Notes that rooms were lost while they worked on a promise; returns how often they were. Where the store has
        no room for it, this server alone knows it."""
        promise.losses += 1
        try:
            self.write([promise_row(promise)])
        except StorageFailed:
            log.exception("the loss of rooms under %s is not in the store", promise.request_id)
        return promise.losses

    def take_settled(self) -> list[Promise]:
        """Returns the promises that got their outcome since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def promise(self, request_id: str) -> Promise:
        """Returns a promise. Raises UnknownId, and GoneError where its outcome is forgotten."""
        if (promise := self._promises.get(request_id)) is not None:
            return promise
        owner_id, _, digits = request_id.rpartition("/")
        seq = count_of(digits)
        if (
            seq is not None
            and (owner_id in self.models or owner_id in self.samplers)
            and self._is_retired(owner_id, seq)
        ):
            raise GoneError(
                f"the result of {request_id!r} was given more than {KEPT_S:g} s ago, or not asked for in "
                f"{UNASKED_S:g} s, and is forgotten"
            )
        raise UnknownId(f"the request {request_id!r}; expected one that was accepted here")

    def give(self, promise: Promise, now: float) -> Outcome | None:
        """Returns the outcome of a promise, None if there is none yet."""
        if promise.outcome and promise.given_s is None:
            promise.given_s = now
        return promise.outcome
