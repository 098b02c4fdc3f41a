"""The part of the protocol's state with promises (accepted requests), and with clients' sessions, models and
samplers."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from service.requests import count_of
from service.tinker.clients import ClientModel, ClientSampler, ClientSession, with_numbers
from service.tinker.owners import SERVER, Caller
from service.tinker.promises import GoneError, Outcome, Promise, UnknownId
from service.tinker.rows import Change, Contents, Stored, row_of, work_key, work_row
from trireme.core.errors import StorageFailed

KEPT_S = 600.0
"""Seconds for which an outcome is retained after it was given, because the reply may not have arrived, or after the end
of its session."""
SAMPLE_KEPT_S = 60.0
"""The same for samples, which are many. A client repeats a sample whose outcome was forgotten."""
UNASKED_S = 3600.0
"""Seconds for which an outcome is kept that its client does not ask for."""
ENDED_S = 86400.0
"""Seconds for which a session that has ended is kept after it, or a model or a sampler of it, was last used."""
MACHINE = "the machine was started again, and the last requests before that may be missing; continue from a saved state"
"""The reason for the end of sessions that the store may hold only in part."""
Thing = TypeVar("Thing", ClientSession, ClientModel, ClientSampler)
log = logging.getLogger(__name__)


@dataclass(eq=False)
class PromiseBook(Contents):
    """All clients' sessions with their models and samplers, all promises (accepted requests) that are not forgotten,
    and the numbers of forgotten ones. If a `caller` does not own an item, methods raise the same error as for a missing
    item."""

    write: Callable[[Sequence[Change]], None] = lambda changes: None
    """Makes changes durable before they are made here. Raises StorageFailed; then nothing is done."""
    changed: Callable[..., None] = lambda *names: None
    """Called when there is more to do. Its argument is the id of a promise that got its outcome; or nothing."""
    used: set[str] = field(default_factory=set)
    """The sessions that clients have named, directly or by a model or a sampler, since the last `retire_sessions`."""

    def _change(self, thing: Stored, *rows: Change, **changed: Any) -> None:
        """Stores the item `thing` with the new field values `changed`, together with `rows`, in one transaction. Then
        sets the fields of `thing` in memory. If the store fails, changes nothing and raises StorageFailed."""
        self.write([row_of(replace(thing, **changed)), *rows])
        for name, value in changed.items():
            setattr(thing, name, value)

    def _look_up(self, kind: str, things: Mapping[str, Thing], name: str, caller: Caller) -> Thing:
        thing = things.get(name)
        if thing is None or not caller.may(self.sessions[thing.session_id].caller.owner):
            raise UnknownId(
                f"the {kind} {name!r}; expected one that was begun here, and whose session is not over and unused for "
                f"{ENDED_S / 3600:g} h"
            )
        self.used.add(thing.session_id)
        return thing

    # ---- sessions

    def begin_session(self, session_id: str, now: float, caller: Caller = SERVER, **metadata: object) -> None:
        """Begins a session of the client `caller`. `metadata`: the client's description of the session."""
        session = ClientSession(session_id, now, caller, metadata)
        self.write([row_of(session)])
        self.sessions[session_id] = session

    def tell(self, session: ClientSession, **fields: object) -> None:
        """Adds `fields` to the client's description of a session."""
        self._change(session, metadata={**session.metadata, **fields})

    def session(self, session_id: str, caller: Caller = SERVER) -> ClientSession:
        """Returns a client's session, also one that has ended. Raises UnknownId if the caller has no such session."""
        return self._look_up("session", self.sessions, session_id, caller)

    def living(self, session_id: str, caller: Caller = SERVER) -> ClientSession:
        """Returns a client's session that has not ended. Raises UnknownId if the caller has no such session, and
        GoneError if it has ended."""
        session = self.session(session_id, caller)
        if session.end_reason:
            raise GoneError(
                f"the session {session_id!r} has ended: {session.end_reason}; begin another one with a new "
                "ServiceClient"
            )
        return session

    def model(self, model_id: str, caller: Caller = SERVER) -> ClientModel:
        """Returns a client's model. Raises UnknownId if the caller has no such model."""
        return self._look_up("model", self.models, model_id, caller)

    def sampler(self, sampler_id: str, caller: Caller = SERVER) -> ClientSampler:
        """Returns a sampling session, even if the client's session that began it has ended: other processes may still
        use it. Raises UnknownId if the caller has no such sampling session. If the client's session ended because the
        machine was restarted, raises GoneError: the store may then lack accepted requests of the sampling session."""
        sampler = self._look_up("sampler", self.samplers, sampler_id, caller)
        if self.sessions[sampler.session_id].end_reason == MACHINE:
            raise GoneError(f"the sampler {sampler_id!r} has ended: {MACHINE}")
        return sampler

    def heard(self, promise: Promise, now: float) -> None:
        """Records that a session's client was alive at the time `now`: it sent a request to a model, or asked for the
        request's outcome. Does nothing for a sampler's requests, because other processes may have sent these."""
        if not promise.is_sample and (session := self.sessions.get(promise.session_id)):
            session.beat_s = now

    # ---- promises

    def _accept(self, promise: Promise, *rows: Change) -> Promise:
        """Stores a new promise, in one transaction with `rows`, adds it to the promises in memory, and returns it."""
        work = [] if promise.outcome else [work_row(promise)]
        self.write([*rows, row_of(promise), *work])
        self.promises[promise.request_id] = promise
        self.changed()
        return promise

    def retire(self, promises: Sequence[Promise]) -> None:
        """Forgets the outcomes of these promises. The numbers of their requests stay known, so that no request is ever
        run again. If the store fails, retains the outcomes."""
        of_owners = defaultdict[str, list[Promise]](list)
        for promise in promises:
            of_owners[promise.owner_id].append(promise)
        for owner_id, settled in of_owners.items():
            removed = [promise.request_id for promise in settled]
            sampler = self.samplers.get(owner_id)
            try:
                if sampler:
                    retired = with_numbers(sampler.retired, [promise.number for promise in settled])
                    self._change(sampler, *removed, retired=retired)
                else:
                    self.write(removed)
            except StorageFailed:
                log.exception("%d outcomes that were given could not be removed", len(settled))
                return
            for promise in settled:
                promise.outcome = None
                promise.forgotten = True
                del self.promises[promise.request_id]

    def retire_sessions(self, now: float) -> None:
        """Forgets clients' sessions, with their models and samplers. A session is forgotten if it has ended, has no
        promise left and was not used for ENDED_S seconds. A session that the store fails to remove is retained."""
        used = self.used | {promise.session_id for promise in self.promises.values()}
        self.used = set()
        for session in [candidate for candidate in self.sessions.values() if candidate.end_reason]:
            if session.session_id in used:
                session.beat_s = now
            elif now - session.beat_s > ENDED_S:
                try:
                    self.write([session.session_id, *session.models, *session.samplers])
                except StorageFailed:
                    log.exception("the session %s, which ended long ago, could not be removed", session.session_id)
                    return
                del self.sessions[session.session_id]
                for model_id in session.models:
                    del self.models[model_id]
                for sampler_id in session.samplers:
                    del self.samplers[sampler_id]

    def accepted(self, owner_id: str, seq: int) -> Promise | None:
        """Returns the promise of request number `seq` of a model or sampler if the request was accepted before, else
        None. If the outcome was forgotten, returns a promise that is marked as `forgotten`."""
        request_id = f"{owner_id}/{seq}"
        promise = self.promises.get(request_id)
        if promise:
            return promise
        model = self.models.get(owner_id)
        if model:
            retired = seq < max(model.next_seq, 1)
        else:
            retired = any(first <= seq <= last for first, last in self.samplers[owner_id].retired)
        if retired:
            return Promise(request_id, "", None, forgotten=True)
        return None

    def settle(self, promise: Promise, outcome: Outcome) -> None:
        """Sets and stores the outcome of a promise (an accepted request)."""
        self._change(promise, work_key(promise.request_id), outcome=outcome)
        self._has_outcome(promise, outcome)

    def _has_outcome(self, promise: Promise, outcome: Outcome) -> None:
        promise.outcome = outcome
        promise.work = None
        self.changed(promise.request_id)

    def lose(self, promise: Promise) -> int:
        """Records that rooms were lost while they worked on a promise. Returns how often that has happened to this
        promise. If the store fails, counts in memory only."""
        promise.losses += 1
        try:
            self.write([row_of(promise)])
        except StorageFailed:
            log.exception("the loss of rooms under %s is not in the store", promise.request_id)
        return promise.losses

    def promise(self, request_id: str, caller: Caller = SERVER) -> Promise:
        """Returns the promise of a request. Raises UnknownId if the caller made no such request. Raises GoneError if
        its outcome was forgotten, or if a restart of the machine may have lost the request."""
        owner_id, _, digits = request_id.rpartition("/")
        seq = count_of(digits)
        owner = self.models.get(owner_id) or self.samplers.get(owner_id)
        session = self.sessions[owner.session_id] if owner else None
        if session and not caller.may(session.caller.owner):
            session = None
        if session and seq is not None:
            promise = self.accepted(owner_id, seq)
        else:
            promise = None
        if promise and promise.forgotten:
            raise GoneError(
                f"the result of {request_id!r} was given some time ago, or not asked for in "
                f"{UNASKED_S:g} s, and is forgotten"
            )
        if promise:
            return promise
        if session and session.end_reason == MACHINE:
            raise GoneError(f"the request {request_id!r} is not known: {MACHINE}")
        raise UnknownId(f"the request {request_id!r}; expected one that was accepted here")

    def give(self, promise: Promise, now: float) -> Outcome | None:
        """Returns the outcome of a promise (an accepted request) and records that the client got it at the time `now`;
        None if there is no outcome yet."""
        if promise.outcome and promise.given_s is None:
            promise.given_s = now
        return promise.outcome
