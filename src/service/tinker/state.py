"""The protocol's state: sessions, models, samplers and promises, without I/O and without a clock of its own.

A request is acknowledged at once with the id of a promise. That id is made of its owner (a model or a sampler) and of
its number there, so a repeated post gets the same promise, and nothing is done twice. A model's requests run in the
order of their numbers, however they arrive: one whose predecessor has not come waits. The trainer has places for so
many models, of which those that have a request take turns (`service.tinker.shares`). Further models wait in the order
in which they came, until the session of one that has a place ends: its client finishes it, or is silent for SESSION_S
seconds. HEIR_S seconds are enough if the next one has the same owner, and either begins with a state of the model that
has the place (it is the same program, started again), or that model has done nothing yet. An adapter whose session has
places already is refused after PLACE_S: its client may wait for itself.

All that changes is first given to `write`, as rows (`service.tinker.rows`) that are committed at once. `load` makes the
same state from them. What is not written is when outcomes were given: that only lets them be forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from service.store import Row
from service.tinker.clients import ClientModel, ClientSampler, Position
from service.tinker.history import ModelHistory, Step
from service.tinker.promise_book import CLONE, KEPT_S, UNASKED_S, PromiseBook
from service.tinker.promises import Failure, Outcome, Promise, UnknownId, UserError
from service.tinker.rows import (
    Change,
    contents,
    model_row,
    promise_row,
    sampler_row,
    session_row,
    step_key,
    step_row,
    work_key,
)
from service.tinker.shares import TokenShares
from service.tinker.turns import SampleTurns

SESSION_S = 120.0
"""Seconds of silence after which a session has ended. A client beats every 10 s."""
HEIR_S = 45.0
"""Seconds of silence after which a model ends whose owner continues it in another session, or waits while it does
nothing. A client's beat is given up after 10 s, so between two that arrive are 30 s if one in between is lost; its
questions for results count too."""
PLACE_S = 60.0
"""Seconds for which an adapter waits for a place while others of its session have places."""
GAP_S = 300.0
"""Seconds for which requests of a model wait for one before them that has not come. The client posts for that long."""


@dataclass(eq=False)
class ProtocolState(PromiseBook):
    """All of it. Times are seconds of a clock that does not go back."""

    make_turns: Callable[[], SampleTurns[Promise]] = SampleTurns
    """Decides in which order samples run."""
    adapters: bool = False
    """The models are adapters: many have places, and none ends for another of its session."""
    places: int = 1
    """The number of models that are trained at the same time."""
    cost: Callable[[object], int] = lambda _: 1
    """Tells for how many tokens a request counts before it runs."""
    origin: Callable[[object], str] = lambda _: ""
    """Tells the path of the state with which a creation begins; "": it begins with none."""
    holders: list[ClientModel] = field(default_factory=list)
    """The models that have a place at the trainer."""
    shares: TokenShares = field(default_factory=TokenShares)
    running: Promise | None = None
    """The request that the trainer works on."""
    turns: SampleTurns[Promise] = field(init=False)
    """The samples that wait, and those that run."""
    _line: deque[ClientModel] = field(default_factory=deque)
    _ended: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns = self.make_turns()

    def load(self, rows: Iterable[Row], now: float) -> None:
        """Has all that is in `rows`, at the time `now`. Raises StorageFailed."""
        found = contents(rows, now)
        self.sessions = found.sessions
        self.models = found.models
        self.samplers = found.samplers
        self._promises = found.promises
        for model in self.models.values():
            if creation := model.waiting.get(0):
                model.origin = self.origin(creation.work)
            if model.ended:  # what the trainer worked on then was not finished
                for promise in list(model.waiting.values()):
                    self.settle(promise, model.refusal)
                model.waiting.clear()
        self.take_settled()
        self.line_up()

    # ---- sessions

    def finish(self, session_id: str, now: float) -> None:
        """Ends a session, and fails what its models wait for. A second call does nothing. Raises UnknownId."""
        if (session := self.sessions.get(session_id)) is None:
            raise UnknownId(f"the session {session_id!r}")
        if session.ended_s is None:
            for model_id in session.models:
                self._end(self.models[model_id], "its session has ended")
            self.write([session_row(replace(session, ended_s=now))])
            session.ended_s = now

    def expire(self, now: float) -> None:
        """Ends the sessions that are silent for too long, and a model one of whose requests does not come; forgets
        outcomes that were given long ago, and those of sessions that ended long ago."""
        for session in self.sessions.values():
            if session.ended_s is None and now - session.beat_s > SESSION_S:
                self.finish(session.session_id, now)
        self._end_continued(now)
        self._end_stuck(now)
        if self.adapters:
            self._end_beyond(now)
        over = []
        for promise in [each for each in self._promises.values() if each.outcome]:
            ended_s = self.sessions[promise.session_id].ended_s
            if promise.settled_s is None:
                promise.settled_s = now
            given_s = ended_s if promise.given_s is None else promise.given_s
            if now - promise.settled_s > UNASKED_S or (given_s is not None and now - given_s > KEPT_S):
                over.append(promise)
        self.retire(over)

    def _end_continued(self, now: float) -> None:
        for heir in list(self._line):
            for model in self.holders:
                session, idle = self.sessions[model.session_id], model.next_seq == 1 and not model.waiting
                own = session.owner == self.sessions[heir.session_id].owner
                continued = heir.origin.startswith(f"tinker://{model.model_id}/")
                if own and (idle or continued) and now - session.beat_s > HEIR_S:
                    does = "continues it" if continued else "waits, while it has done nothing"
                    self._end(model, f"its client was silent for {HEIR_S:g} s, and {heir.model_id} {does}")
                    self._line.remove(heir)
                    self.holders.append(heir)  # a program that is started again keeps its place
                    break

    def _end_beyond(self, now: float) -> None:
        """Refuses adapters that have waited for PLACE_S while their session has others: its client may wait for them to
        be created before it lets those go."""
        for model in list(self._line):
            names = [each.model_id for each in self.holders if each.session_id == model.session_id]
            if not names:
                model.lined_s = None
            elif model.lined_s is None:
                model.lined_s = now
            elif now - model.lined_s > PLACE_S:
                self._end(
                    model,
                    f"no place was free within {PLACE_S:g} s: {self.places} adapters are trained at the same time "
                    f"(service.models), and its session has {len(names)} of them: {', '.join(names)}. Train it in "
                    "another session once one of these has ended, or start the server with a higher --service.models",
                )

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

    def end_model(self, model_id: str, why: str) -> None:
        """Ends a model: it cannot be trained any more. Raises UnknownId."""
        self._end(self.model(model_id), why)

    def _end(self, model: ClientModel, why: str) -> None:
        """Ends a model. What the trainer works on is finished."""
        if model.ended:
            return
        ended = replace(model, ended=why, history=ModelHistory())
        refused = [each for each in model.waiting.values() if each is not self.running]
        rows = [model_row(ended), *self._removed_steps(model, model.history.numbers)]
        for promise in refused:
            rows += [promise_row(replace(promise, outcome=ended.refusal)), work_key(promise.request_id)]
        self.write(rows)
        model.ended = why
        model.history = ended.history
        for promise in refused:
            self._has_outcome(promise, ended.refusal)
        model.waiting = {seq: each for seq, each in model.waiting.items() if each is self.running}
        if model in self._line:
            self._line.remove(model)
        if model in self.holders:
            self.holders.remove(model)
        self.shares.forget(model.model_id)
        self._ended.append(model.model_id)

    @staticmethod
    def _removed_steps(model: ClientModel, numbers: Iterable[int]) -> list[Change]:
        requests = [f"{model.model_id}/{number}" for number in numbers]
        return [key(request_id) for request_id in requests for key in (work_key, step_key)]

    def take_ended(self) -> list[str]:
        """Returns the models that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def position(self, promise: Promise) -> Position:
        """Tells why a promise has no outcome yet."""
        model = self.models.get(promise.owner_id)
        if model is None or model in self.holders:
            return Position("active", "")
        before = self._line.index(model) if model in self._line else 0
        own = {self.sessions[promise.session_id].owner}
        seen = [each for each in self.holders if self.sessions[each.session_id].owner in own]
        holder = seen[0].model_id if seen else "another model"
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
        if model_id in self.models and (known := self._known(model_id, 0)):
            return known
        model = ClientModel(model_id, session_id, origin=self.origin(work))
        promise = self._accept(Promise(f"{model_id}/0", session_id, work), model_row(model))
        self.models[model_id] = model
        session.models.append(model_id)
        self._line.append(model)
        model.waiting[0] = promise
        return promise

    def model(self, model_id: str) -> ClientModel:
        """Returns a model. Raises UnknownId."""
        if (model := self.models.get(model_id)) is None:
            raise UnknownId(f"the model {model_id!r}; expected one that was created since the server began")
        return model

    def train(self, model_id: str, seq_id: int, work: object) -> Promise:
        """Accepts request `seq_id` of a model. Raises UnknownId, and UserError for a
        number below 1."""
        model = self.model(model_id)
        if seq_id < 1:
            raise UserError(f"seq_id = {seq_id}; expected 1 or more, as 0 is the creation of the model")
        if known := self._known(model_id, seq_id):
            return known
        promise = Promise(f"{model_id}/{seq_id}", model.session_id, work)
        if model.ended:
            self._accept(replace(promise, work=None, outcome=model.refusal))
        else:
            model.waiting[seq_id] = self._accept(promise)
        return self._promises[promise.request_id]

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

    def line_up(self) -> None:
        """Gives places at the trainer to the models that had them, and lets those wait that were not created yet: after
        the records of this state were read, and when the trainer was lost."""
        self.running = None
        living = [model for model in self.models.values() if not model.ended]
        self._line = deque(model for model in living if model.next_seq == 0)
        self.holders = [model for model in living if model.next_seq > 0]

    def _pass_on(self) -> None:
        """Gives free places to the next models in the line. A whole model takes the place of one of the same session
        that has nothing to do and waits for nothing, as the client would otherwise wait for itself."""
        while self._line and len(self.holders) < self.places:
            self.holders.append(self._line.popleft())
        for before in [model for model in self.holders if not (model.waiting or self.adapters)]:
            heir = next((model for model in self._line if model.session_id == before.session_id), None)
            if heir:
                self._line.remove(heir)
                many = "one is" if self.places == 1 else f"{self.places} are"
                self._end(
                    before, f"{heir.model_id} of the same session has its place now, and {many} trained at a time"
                )
                self.holders.append(heir)

    def trained(self, outcome: Outcome, tokens: int = 0, now: float = 0.0) -> None:
        """Notes the outcome of what the trainer worked on, and that it counts for so many `tokens` more. A model whose
        creation failed gives the trainer back. What has to be done again for the model if the trainer is lost is
        committed together with the outcome."""
        promise = self.running
        assert promise, "only after next_training"
        model = self.models[promise.owner_id]
        number = promise.number
        error = outcome.error if isinstance(outcome, Failure) else ""
        if number == 0 and error:
            self._end(model, f"it could not be created: {error}")
        before = model.history
        after = before if model.ended else before.noted(Step(number, promise.work, error), now)
        dropped = before.numbers - after.numbers
        rows = [
            promise_row(replace(promise, outcome=outcome)),
            model_row(replace(model, next_seq=number + 1)),
            step_row(promise.request_id, error) if number in after.numbers else work_key(promise.request_id),
        ]
        self.write([*rows, *self._removed_steps(model, dropped)])
        self.running = None
        model.waiting.pop(number, None)
        model.next_seq = number + 1
        model.history = after
        if not model.ended:
            self.shares.charge(promise.owner_id, tokens)
        self._has_outcome(promise, outcome)

    def committed(self, model: ClientModel, place: str) -> None:
        """Notes that all steps of a model are in the directory `place`."""
        after = model.history.committed(place)
        steps = self._removed_steps(model, model.history.numbers - after.numbers)
        self.write([model_row(replace(model, history=after)), *steps])
        model.history = after

    # ---- sampling

    def create_sampler(self, session_id: str, seq: int, target: str) -> ClientSampler:
        """Begins a sampling session from the weights `target`. Raises UnknownId, GoneError."""
        session, sampler_id = self.session(session_id), f"{session_id}:sample:{seq}"
        if sampler_id not in self.samplers:
            sampler = ClientSampler(sampler_id, session_id, target)
            self.write([sampler_row(sampler)])
            self.samplers[sampler_id] = sampler
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
        self.write([sampler_row(replace(sampler, joined=sampler.joined + 1))])
        sampler.joined += 1
        return sampler.joined

    def has_asked(self, owner_id: str, seq_id: int) -> bool:
        """Tells whether request `seq_id` of a model or a sampler was accepted."""
        return self._known(owner_id, seq_id) is not None

    def sample(self, sampler_id: str, seq_id: int, work: object) -> Promise:
        """Accepts sample `seq_id` of a sampler. Raises UnknownId."""
        sampler = self.sampler(sampler_id)
        if known := self._known(sampler_id, seq_id):
            return known
        promise = self._accept(Promise(f"{sampler_id}/{seq_id}", sampler.session_id, work))
        self.turns.add(sampler.target, promise)
        return promise

    def sampled(self, promise: Promise, outcome: Outcome) -> None:
        """Notes the outcome of a sample that ran."""
        self.settle(promise, outcome)
        self.turns.ended(promise)

    def sample_again(self, held: Collection[str], why: Failure) -> None:
        """Lets all samples wait anew that have no outcome, as no replica works on them any more. Those from weights
        that are not in `held` fail."""
        self.turns = self.make_turns()
        for promise in self.promises():
            if promise.outcome is None and (sampler := self.samplers.get(promise.owner_id)):
                if sampler.target in held:
                    self.turns.add(sampler.target, promise)
                else:
                    self.settle(promise, why)

    def completions(
        self, sampler_id: str, clone: int, cursor: int, retrieved: Collection[str]
    ) -> tuple[list[Promise], int]:
        """Returns the samples of a clone that were done after `cursor`, and the cursor behind them. Those before it are
        not listed again, and results of those in `retrieved` are dropped. Raises UnknownId."""
        sampler = self.sampler(sampler_id)
        known = [self._promises.get(request_id) for request_id in retrieved]
        self.retire([each for each in known if each and each.outcome and each.owner_id == sampler_id])
        own = [each for number, each in sampler.answers.items() if number // CLONE == clone]
        new = sorted((each for each in own if each.place >= cursor), key=lambda each: each.place)
        return new, sampler.done
