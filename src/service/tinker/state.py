"""The protocol's state: sessions, models, samplers and promises, without I/O and without a clock of its own.

A request is acknowledged at once with the id of a promise. That id is made of its owner (a model or a sampler) and of
its number there, so a repeated post gets the same promise, and nothing is done twice. A model's requests run in the
order of their numbers, however they arrive: one whose predecessor has not come waits. The trainer has places for so
many models, of which those that have a request take turns (`service.tinker.shares`). Further models wait in the order
in which they came, until the session of one that has a place ends: its client finishes it, or is silent for SESSION_S
seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from service.tinker.adapter_turns import AdapterTurns
from service.tinker.promises import ClientModel, ClientSampler, ClientSession, Failure, Outcome, Promise, UserError
from service.tinker.shares import TokenShares
from service.tinker.turns import WeightTurns

SESSION_S = 120.0
"""Seconds of silence after which a session has ended. A client beats every 10 s."""
KEPT_S = 600.0
"""Seconds for which an outcome is kept after it was given, as the answer may not have arrived, or after the session."""
GAP_S = 300.0
"""Seconds for which requests of a model wait for one before them that has not come. The client posts for that long."""
CLONE = 1_000_000_000
"""A clone of a sampler numbers its samples from this times its own number."""


class UnknownId(Exception):
    """An id that was never given out."""


class GoneError(Exception):
    """A thing that was there and is over."""


@dataclass(frozen=True)
class Position:
    """Where a request is that has no outcome yet."""

    queue_state: str
    """`active`, or `paused_capacity`: the places of the trainer belong to other clients."""
    reason: str
    """A sentence for the user."""


@dataclass(eq=False)
class ProtocolState:
    """All of it. Times are seconds of a clock that does not go back."""

    sessions: dict[str, ClientSession] = field(default_factory=dict)
    models: dict[str, ClientModel] = field(default_factory=dict)
    samplers: dict[str, ClientSampler] = field(default_factory=dict)
    turns: WeightTurns[Promise] | AdapterTurns[Promise] = field(default_factory=WeightTurns)
    """The samples that wait, and those that run."""
    places: int = 1
    """The number of models that are trained at the same time."""
    cost: Callable[[object], int] = lambda _: 1
    """Tells for how many tokens a request counts."""
    holders: list[ClientModel] = field(default_factory=list)
    """The models that have a place at the trainer."""
    shares: TokenShares = field(default_factory=TokenShares)
    running: Promise | None = None
    """The request that the trainer works on."""
    _line: deque[ClientModel] = field(default_factory=deque)
    _ended: list[str] = field(default_factory=list)
    _promises: dict[str, Promise] = field(default_factory=dict)
    _settled: list[Promise] = field(default_factory=list)

    # ---- sessions

    def begin_session(self, session_id: str, now: float) -> None:
        """Begins a session."""
        self.sessions[session_id] = ClientSession(session_id, now)

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

    def finish(self, session_id: str, now: float) -> None:
        """Ends a session, and fails what its models wait for. A second call does nothing. Raises UnknownId."""
        if (session := self.sessions.get(session_id)) is None:
            raise UnknownId(f"the session {session_id!r}")
        if session.ended_s is None:
            session.ended_s = now
            for model_id in session.models:
                self._end(self.models[model_id], "its session has ended")

    def expire(self, now: float) -> None:
        """Ends the sessions that are silent for too long, and a model one of whose requests does not come; forgets
        outcomes that were given long ago, and those of sessions that ended long ago."""
        for session in self.sessions.values():
            if session.ended_s is None and now - session.beat_s > SESSION_S:
                self.finish(session.session_id, now)
        self._end_stuck(now)
        for promise in self._promises.values():
            ended_s = self.sessions[promise.session_id].ended_s
            given_s = ended_s if promise.given_s is None else promise.given_s
            if promise.outcome and given_s is not None and now - given_s > KEPT_S:
                promise.forget()
        for promise in [each for each in self._promises.values() if each.forgotten]:
            ended_s = self.sessions[promise.session_id].ended_s
            if ended_s is not None and now - ended_s > KEPT_S:
                del self._promises[promise.request_id]

    def _end_stuck(self, now: float) -> None:
        for model in [each for each in self.holders if each.waiting and not each.ready]:
            self._end_if_stuck(model, now)

    def _end_if_stuck(self, model: ClientModel, now: float) -> None:
        if model.gap is None or model.gap[0] != model.next_seq:
            model.gap = model.next_seq, now
        elif now - model.gap[1] > GAP_S:
            self._end(
                model,
                f"its request {model.next_seq} did not come within {GAP_S:g} s, and later ones waited for it (was it "
                "larger than service.max_body_mb?); continue from a saved state",
            )

    def fail_all(self, failure: Failure) -> None:
        """Gives `failure` to all that have no outcome yet: nothing more will be done."""
        for promise in self._promises.values():
            if promise.outcome is None and not promise.forgotten:
                self._settle(promise, failure)

    def _end(self, model: ClientModel, why: str) -> None:
        """Ends a model. What the trainer works on is finished."""
        if model.ended:
            return
        model.ended = why
        for promise in [each for each in model.waiting.values() if each is not self.running]:
            self._settle(promise, model.refusal)
        model.waiting = {seq: each for seq, each in model.waiting.items() if each is self.running}
        if model in self._line:
            self._line.remove(model)
        if model in self.holders:
            self.holders.remove(model)
        self.shares.forget(model.model_id)
        self._ended.append(model.model_id)

    def take_ended(self) -> list[str]:
        """Returns the models that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # ---- promises

    def _promise(self, request_id: str, session_id: str, work: object) -> Promise:
        promise = self._promises[request_id] = Promise(request_id, session_id, work)
        return promise

    def _settle(self, promise: Promise, outcome: Outcome) -> None:
        promise.outcome, promise.work = outcome, None
        self._settled.append(promise)

    def take_settled(self) -> list[Promise]:
        """Returns the promises that got their outcome since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def promise(self, request_id: str) -> Promise:
        """Returns a promise. Raises UnknownId, and GoneError where its outcome is forgotten."""
        if (promise := self._promises.get(request_id)) is None:
            raise UnknownId(f"the request {request_id!r}; expected one that was accepted since the server began")
        if promise.forgotten:
            raise GoneError(f"the result of {request_id!r} was given more than {KEPT_S:g} s ago, and is forgotten")
        return promise

    def give(self, promise: Promise, now: float) -> Outcome | None:
        """Returns the outcome of a promise, None if there is none yet."""
        if promise.outcome and promise.given_s is None:
            promise.given_s = now
        return promise.outcome

    def position(self, promise: Promise) -> Position:
        """Tells why a promise has no outcome yet."""
        model = self.models.get(promise.request_id.rpartition("/")[0])
        if model is None or model in self.holders:
            return Position("active", "")
        before = self._line.index(model) if model in self._line else 0
        holder = self.holders[0].model_id if self.holders else "another model"
        few = (
            "trains one model at a time" if self.places == 1 else f"trains {self.places} models at a time, all of them"
        )
        others = "" if self.places == 1 else " and others"
        text = f"{holder}{others} has the trainer, which {few}; {before} more are before this one"
        return Position("paused_capacity", text)

    # ---- training

    def create_model(self, session_id: str, model_seq: int, work: object) -> Promise:
        """Asks for the trainer for a new model, whose id is made of its session and its number there. Raises UnknownId,
        GoneError."""
        session, model_id = self.session(session_id), f"{session_id}:train:{model_seq}"
        if model_id in self.models:
            return self._promises[f"{model_id}/0"]
        model = self.models[model_id] = ClientModel(model_id, session_id)
        session.models.append(model_id)
        self._line.append(model)
        promise = model.waiting[0] = self._promise(f"{model_id}/0", session_id, work)
        return promise

    def model(self, model_id: str) -> ClientModel:
        """Returns a model. Raises UnknownId."""
        if (model := self.models.get(model_id)) is None:
            raise UnknownId(f"the model {model_id!r}; expected one that was created since the server began")
        return model

    def train(self, model_id: str, seq_id: int, work: object) -> Promise:
        """Accepts request `seq_id` of a model. Raises UnknownId, and UserError for a number below 1."""
        model, request_id = self.model(model_id), f"{model_id}/{seq_id}"
        if seq_id < 1:
            raise UserError(f"seq_id = {seq_id}; expected 1 or more, as 0 is the creation of the model")
        if request_id in self._promises:
            return self._promises[request_id]
        promise = self._promise(request_id, model.session_id, work)
        if model.ended:
            self._settle(promise, model.refusal)
        else:
            model.waiting[seq_id] = promise
        return promise

    def next_training(self) -> tuple[ClientModel, Promise] | None:
        """Returns the model and the request that the trainer is to work on now; None if there is none, or it works."""
        if self.running:
            return None
        self._pass_on()
        ready = {model.model_id: model for model in self.holders if model.ready}
        if not ready:
            return None
        model = ready[self.shares.choose(list(ready))]
        promise = self.running = model.ready
        assert promise
        self.shares.charge(model.model_id, self.cost(promise.work))
        return model, promise

    def _pass_on(self) -> None:
        """Gives free places to the next models in the line. A model takes the place of one of the same session that has
        nothing to do and waits for nothing, as the client would otherwise wait for itself."""
        while self._line and len(self.holders) < self.places:
            self.holders.append(self._line.popleft())
        for before in [model for model in self.holders if not model.waiting]:
            heir = next((model for model in self._line if model.session_id == before.session_id), None)
            if heir:
                self._line.remove(heir)
                many = "one is" if self.places == 1 else f"{self.places} are"
                self._end(
                    before, f"{heir.model_id} of the same session has its place now, and {many} trained at a time"
                )
                self.holders.append(heir)

    def trained(self, outcome: Outcome) -> None:
        """Notes the outcome of what the trainer worked on. A model whose creation failed gives the trainer back."""
        promise = self.running
        assert promise, "only after next_training"
        self.running = None
        self._settle(promise, outcome)
        model = self.models[promise.request_id.rpartition("/")[0]]
        model.waiting.pop(model.next_seq)
        model.next_seq += 1
        if model.next_seq == 1 and isinstance(outcome, Failure):
            self._end(model, f"it could not be created: {outcome.error}")

    # ---- sampling

    def create_sampler(self, session_id: str, seq: int, target: str) -> ClientSampler:
        """Begins a sampling session from the weights `target`. Raises UnknownId, GoneError."""
        session, sampler_id = self.session(session_id), f"{session_id}:sample:{seq}"
        if sampler_id not in self.samplers:
            self.samplers[sampler_id] = ClientSampler(sampler_id, session_id, target)
            session.samplers.append(sampler_id)
        return self.samplers[sampler_id]

    def sampler(self, sampler_id: str) -> ClientSampler:
        """Returns a sampling session. Raises UnknownId."""
        if (sampler := self.samplers.get(sampler_id)) is None:
            raise UnknownId(f"the sampler {sampler_id!r}; expected one that was created since the server began")
        return sampler

    def join(self, sampler_id: str) -> int:
        """Returns a number that no other clone of a sampler has: 1, 2, ... Raises UnknownId."""
        sampler = self.sampler(sampler_id)
        sampler.joined += 1
        return sampler.joined

    def has_sample(self, sampler_id: str, seq_id: int) -> bool:
        """Tells whether a sampler has accepted sample `seq_id`."""
        return f"{sampler_id}/{seq_id}" in self._promises

    def sample(self, sampler_id: str, seq_id: int, work: object) -> Promise:
        """Accepts sample `seq_id` of a sampler. Raises UnknownId."""
        sampler, request_id = self.sampler(sampler_id), f"{sampler_id}/{seq_id}"
        if request_id in self._promises:
            return self._promises[request_id]
        promise = self._promise(request_id, sampler.session_id, work)
        self.turns.add(sampler.target, promise)
        return promise

    def sampled(self, promise: Promise, outcome: Outcome) -> None:
        """Notes the outcome of a sample that ran."""
        self.turns.ended(promise)
        self._settle(promise, outcome)
        sampler_id, _, seq = promise.request_id.rpartition("/")
        done = self.samplers[sampler_id].completed.setdefault(int(seq) // CLONE, [])
        done.append(promise.request_id)

    def completions(
        self, sampler_id: str, clone: int, cursor: int, retrieved: Collection[str]
    ) -> tuple[list[Promise], int]:
        """Returns the samples of a clone that were done after `cursor`, and the cursor behind them. Results of those in
        `retrieved` are dropped. Raises UnknownId."""
        done = self.sampler(sampler_id).completed.get(clone, [])
        for request_id in retrieved:
            if (known := self._promises.get(request_id)) and known.outcome:
                known.forget()
        new = [self._promises[request_id] for request_id in done[max(cursor, 0) :] if request_id in self._promises]
        return [promise for promise in new if not promise.forgotten], len(done)
