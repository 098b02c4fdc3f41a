"""The promises of the protocol's state, and those whom they belong to: sessions, and their models and samplers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from service.asked import count_of
from service.tinker.promises import (
    ClientModel,
    ClientSampler,
    ClientSession,
    GoneError,
    Outcome,
    Promise,
    RetiredNumbers,
    UnknownId,
)
from service.tinker.records import OutcomeKnown, Record, RoomsLost, SessionBegun, SessionTold
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

    sessions: dict[str, ClientSession] = field(default_factory=dict)
    models: dict[str, ClientModel] = field(default_factory=dict)
    samplers: dict[str, ClientSampler] = field(default_factory=dict)
    losses: Counter[str] = field(default_factory=Counter)
    """How often rooms were lost while they worked on a request without an outcome."""
    write: Callable[[Record], None] = lambda record: None
    """Takes each record before what it says is done. Raises StorageFailed; then nothing is done."""
    _promises: dict[str, Promise] = field(default_factory=dict)
    _settled: list[Promise] = field(default_factory=list)

    # ---- sessions

    def begin_session(
        self, session_id: str, now: float, owner: str = "", metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Begins a session of the key `owner`."""
        self.write(SessionBegun(session_id, owner, metadata or {}))
        self.sessions[session_id] = ClientSession(session_id, now, owner, metadata or {})

    def tell(self, session_id: str, told: Mapping[str, Any]) -> None:
        """Notes more of what a client says of its session. Raises UnknownId."""
        if (session := self.sessions.get(session_id)) is None:
            raise UnknownId(f"the session {session_id!r}")
        self.write(SessionTold(session_id, told))
        session.metadata = {**session.metadata, **told}

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

    def retire(self, promise: Promise) -> None:
        """Forgets a promise that has its outcome. Its number is kept, so that it is never done again."""
        promise.forget()
        del self._promises[promise.request_id]
        retired, number = self._retired(promise.owner_id, promise.number)
        retired.add(number)

    def _retired(self, owner_id: str, seq: int) -> tuple[RetiredNumbers, int]:
        """Returns the numbers that are retired of a model, or of a sampler's clone, and that of request `seq` there."""
        if model := self.models.get(owner_id):
            return model.retired, seq
        return self.samplers[owner_id].clone(seq // CLONE).retired, seq % CLONE

    def promises(self) -> list[Promise]:
        """Returns all promises that are kept, in the order in which they were made."""
        return list(self._promises.values())

    def unsettled(self, request_id: str) -> Promise | None:
        """Returns the promise of this id, if it is there and has no outcome yet."""
        promise = self._promises.get(request_id)
        return promise if promise and promise.outcome is None else None

    def make_promise(self, request_id: str, session_id: str, work: object, outcome: Outcome | None = None) -> Promise:
        """Makes a promise, for requests and for records of them."""
        promise = self._promises[request_id] = Promise(request_id, session_id, work, outcome)
        return promise

    def _known(self, owner_id: str, seq: int) -> Promise | None:
        """Returns the promise of a request that was accepted before. One that is retired has a forgotten one."""
        retired, number = self._retired(owner_id, seq)
        request_id = f"{owner_id}/{seq}"
        return Promise(request_id, "", None, forgotten=True) if number in retired else self._promises.get(request_id)

    def settle(self, promise: Promise, outcome: Outcome) -> None:
        """Gives a promise its outcome."""
        self.write(OutcomeKnown(promise.request_id, outcome))
        promise.outcome, promise.work = outcome, None
        self.losses.pop(promise.request_id, None)
        self._settled.append(promise)

    def lose(self, promise: Promise) -> int:
        """Notes that rooms were lost while they worked on a promise; returns how often they were. Where the journal
        has no room for it, this server alone knows it."""
        self.losses[promise.request_id] += 1
        try:
            self.write(RoomsLost(promise.request_id))
        except StorageFailed:
            log.exception("the loss of rooms under %s is not in the journal", promise.request_id)
        return self.losses[promise.request_id]

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
        if (owner_id in self.models or owner_id in self.samplers) and seq is not None:
            retired, number = self._retired(owner_id, seq)
            if number in retired:
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
