"""The protocol's state: sessions, models, samplers and promises, without I/O and without a clock of its own.

A request is acknowledged at once with the id of a promise. The id consists of the owner (a model or a sampler) and of
the request's number there, so a repeated post gets the same promise, and nothing is done twice. A model's requests run
in the order of their numbers, however they arrive: a request waits until its predecessor has come. The trainer has
places for n models, and the models among them that have a request take turns (`service.tinker.shares`). Further models
wait in the order in which they came, until the session of a model with a place ends: its client finishes it, or is
silent for SESSION_S seconds. For a waiting model of the same owner, HEIR_S seconds of silence are enough in two cases:
it begins with a state of the model that has the place (it is the same program, started again), or the model that has
the place has done nothing yet. If the session of a waiting adapter has places already, the adapter is refused after
PLACE_S seconds: its client may wait for itself.

Each change first goes to `write`, as rows (`service.tinker.rows`) that are committed at once. `load` makes the same
state from the rows. The times at which outcomes were given are not written: they only decide when to forget an outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from service.requests import RequestRefused
from service.store import Row
from service.tinker.bodies import LoadModelBody
from service.tinker.clients import ClientModel, ClientSampler, ClientSession
from service.tinker.model_history import ModelHistory, Step
from service.tinker.owners import SERVER, Caller
from service.tinker.promise_book import KEPT_S, MACHINE, SAMPLE_KEPT_S, UNASKED_S, PromiseBook
from service.tinker.promises import Category, Failure, Outcome, Promise
from service.tinker.rows import Change, row_of, step_key, step_row, work_key
from service.tinker.sample_scheduler import SampleScheduler
from service.tinker.shares import TokenShares, tokens_of

SESSION_S = 120.0
"""Seconds of silence after which a session has ended. A client beats every 10 s."""
HEIR_S = 45.0
"""Seconds of silence that end a model if its owner continues it in another session, or waits while it does nothing. A
client's heartbeat times out after 10 s, so two that arrive are 30 s apart if one in between is lost; its requests for
results count too."""
PLACE_S = 60.0
"""Seconds for which an adapter waits for a place while others of its session have places."""
GAP_S = 300.0
"""Seconds for which requests of a model wait for one before them that has not come. The client posts for that long."""


@dataclass(eq=False)
class ProtocolState(PromiseBook):
    """The whole state of the protocol. Times are seconds of a monotonic clock."""

    make_turns: Callable[[], SampleScheduler] = SampleScheduler
    """Makes the scheduler that decides in which order samples run."""
    adapters: bool = False
    """True if the models are adapters: several have places, and no model ends because another model of its session
    waits."""
    places: int = 1
    """The number of models that are trained at the same time."""
    holders: list[ClientModel] = field(default_factory=list)
    """The models that have a place at the trainer."""
    shares: TokenShares = field(default_factory=TokenShares)
    running: Promise | None = None
    """The request that the trainer works on."""
    turns: SampleScheduler = field(init=False)
    """The scheduler, with the waiting and running samples."""
    _line: deque[ClientModel] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.turns = self.make_turns()

    def load(self, rows: Iterable[Row], now: float) -> None:
        """Restores sessions, models, samplers and promises from stored `rows`, and fails the pending requests of failed
        models. The silence of a session, and the time since its end, count from `now`. Raises StorageFailed if a row is
        damaged."""
        self.read(rows, now)
        for model in self.models.values():
            if model.failure:  # what the trainer worked on then was not finished
                for promise in list(model.waiting.values()):
                    self.settle(promise, model.failure)
                model.waiting.clear()
        self.line_up()

    # ---- sessions

    def finish(self, session: ClientSession, now: float, reason: str, category: Category = "user") -> None:
        """Ends a client's session for `reason`, and fails the pending requests of its models."""
        for model_id in session.models:
            self.end_model(self.models[model_id], f"its session has ended: {reason}", category)
        self._change(session, end_reason=reason, ended_s=now)

    def finish_all(self, now: float) -> None:
        """Ends all clients' sessions and fails all pending requests. Called after a restart of the machine, because the
        store may then lack results that clients have."""
        for session in self.sessions.values():
            self.finish(session, now, MACHINE, "server")
        for promise in list(self.promises.values()):
            if promise.outcome is None:
                self.settle(promise, Failure(MACHINE, "server"))

    def expire(self, now: float) -> None:
        """Ends clients' sessions that are silent for too long, and models that wait too long for their next request or
        for a place at the trainer; forgets outcomes that were given long ago, and sessions that ended long ago."""
        for session in self.sessions.values():
            if not session.end_reason and now - session.beat_s > SESSION_S:
                self.finish(session, now, f"its client was silent for {SESSION_S:g} s")
        self._end_continued(now)
        self._end_stuck(now)
        if self.adapters:
            self._end_beyond(now)
        over = []
        for promise in [candidate for candidate in self.promises.values() if candidate.outcome]:
            ended_s = self.sessions[promise.session_id].ended_s
            if promise.settled_s is None:
                promise.settled_s = now
            if promise.given_s is None:
                given_s = ended_s
            else:
                given_s = promise.given_s
            if promise.is_sample:
                kept_s = SAMPLE_KEPT_S
            else:
                kept_s = KEPT_S
            if now - promise.settled_s > UNASKED_S or (given_s is not None and now - given_s > kept_s):
                over.append(promise)
        self.retire(over)
        self.retire_sessions(now)

    def _end_continued(self, now: float) -> None:
        for heir in list(self._line):
            work = heir.waiting[0].work
            if isinstance(work, LoadModelBody):
                origin = work.path
            else:
                origin = ""
            for model in self.holders:
                session = self.sessions[model.session_id]
                idle = model.next_seq == 1 and not model.waiting
                continued = origin.startswith(f"tinker://{model.model_id}/")
                if self._same_owner(model, heir) and (idle or continued) and now - session.beat_s > HEIR_S:
                    self.end_model(
                        model, f"its client was silent for {HEIR_S:g} s, and {heir.model_id} takes its place"
                    )
                    self._line.remove(heir)
                    self.holders.append(heir)  # a program that is started again keeps its place
                    break

    def _end_beyond(self, now: float) -> None:
        """Ends adapters that have waited for a place for more than PLACE_S seconds while other adapters of their
        session have places. Otherwise a client that waits for a new adapter before it ends an old one would wait for
        ever."""
        for model in list(self._line):
            names = [holder.model_id for holder in self.holders if holder.session_id == model.session_id]
            if model.waited("a place" if names else "", now) > PLACE_S and names:
                self.end_model(
                    model,
                    f"no place was free within {PLACE_S:g} s: {self.places} adapters are trained at the same time "
                    f"(service.models), and its session has {len(names)} of them: {', '.join(names)}. Train it in "
                    "another session once one of these has ended, or start the server with a higher --service.models",
                )

    def _end_stuck(self, now: float) -> None:
        for model in [holder for holder in self.holders if holder.waiting and not holder.ready]:
            if model.waited(model.next_seq, now) > GAP_S:
                self.end_model(
                    model,
                    f"its request {model.next_seq} did not come within {GAP_S:g} s, and later ones waited for it (was "
                    "it larger than service.max_body_mb?); continue from a saved state",
                )

    def end_model(self, model: ClientModel, reason: str, category: Category = "user") -> None:
        """Ends a model: it cannot be trained any more, and its waiting requests fail with `reason`. If the trainer
        already works on one of its requests, that request still runs to its end."""
        if model.failure:
            return
        failure = Failure(f"the model {model.model_id} cannot be trained any more: {reason}", category)
        refused = [pending for pending in model.waiting.values() if pending is not self.running]
        rows = self._removed_steps(model, model.history.numbers)
        for promise in refused:
            rows += [row_of(replace(promise, outcome=failure)), work_key(promise.request_id)]
        self._change(model, *rows, failure=failure, history=ModelHistory())
        for promise in refused:
            self._has_outcome(promise, failure)
        model.waiting = {seq: pending for seq, pending in model.waiting.items() if pending is self.running}
        if model in self._line:
            self._line.remove(model)
        if model in self.holders:
            self.holders.remove(model)
        self.shares.forget(model.model_id)
        self.changed()

    @staticmethod
    def _removed_steps(model: ClientModel, numbers: Iterable[int]) -> list[Change]:
        requests = [f"{model.model_id}/{number}" for number in numbers]
        return [key(request_id) for request_id in requests for key in (work_key, step_key)]

    def queued(self, promise: Promise) -> str:
        """Returns why the model of `promise` waits for a place at the trainer, as a text for its client; "" if it does
        not wait for a place."""
        model = self.models.get(promise.owner_id)
        if model is None or model not in self._line:
            return ""
        holders = ", ".join(holder.model_id for holder in self.holders if self._same_owner(holder, model))
        return (
            f"{self._line.index(model)} models are before this one, and {self.places} are trained at the same time; of "
            f"this owner {holders or 'none'}"
        )

    def _same_owner(self, one: ClientModel, other: ClientModel) -> bool:
        return self.sessions[one.session_id].caller.owner == self.sessions[other.session_id].caller.owner

    # ---- training

    def create_model(self, session_id: str, model_seq: int, work: object, caller: Caller = SERVER) -> Promise:
        """Accepts a new model, which waits for a place at the trainer, and returns the promise of its creation; a
        repeated request gets the same promise. The model's id consists of its session's id and `model_seq`. Raises
        UnknownId if there is no such session, and GoneError if the session has ended."""
        session = self.living(session_id, caller)
        model_id = f"{session_id}:train:{model_seq}"
        if model_id in self.models and (earlier := self.accepted(model_id, 0)):
            return earlier
        model = ClientModel(model_id, session_id)
        promise = self._accept(Promise(f"{model_id}/0", session_id, work), row_of(model))
        self.models[model_id] = model
        session.models.append(model_id)
        self._line.append(model)
        model.waiting[0] = promise
        return promise

    def train(self, model_id: str, seq_id: int, work: object, caller: Caller = SERVER) -> Promise:
        """Accepts request number `seq_id` of a model, and returns its promise; a repeated request gets the same
        promise. Raises UnknownId if there is no such model, and RequestRefused for a number below 1."""
        model = self.model(model_id, caller)
        if seq_id < 1:
            raise RequestRefused(f"seq_id = {seq_id}; expected 1 or more, as 0 is the creation of the model")
        earlier = self.accepted(model_id, seq_id)
        if earlier:
            return earlier
        work = None if model.failure else work
        promise = self._accept(Promise(f"{model_id}/{seq_id}", model.session_id, work, model.failure))
        if not model.failure:
            model.waiting[seq_id] = promise
        return promise

    def next_training(self) -> tuple[ClientModel, Promise] | None:
        """Returns the model and the request that the trainer runs next, and counts this request as running; None if no
        request is ready or another one is running."""
        if self.running:
            return None
        self._pass_on()
        ready = {model.model_id: model for model in self.holders if model.ready}
        if not ready:
            return None
        model = ready[self.shares.choose(list(ready))]
        promise = self.running = model.ready
        assert promise
        self.shares.charge(model.model_id, tokens_of(promise.work))
        return model, promise

    def line_up(self) -> None:
        """Gives a place at the trainer to each model that the trainer has already created; puts the other models in
        line for a place again. Called after the state was loaded, and after the trainer was lost."""
        self.running = None
        living = [model for model in self.models.values() if not model.failure]
        self._line = deque(model for model in living if model.next_seq == 0)
        self.holders = [model for model in living if model.next_seq > 0]

    def _pass_on(self) -> None:
        """Gives free places at the trainer to the models that have waited longest. If a whole model (not an adapter)
        has no request while another model of its session waits, ends the idle model and gives its place to the waiting
        one. Otherwise the client might wait for ever."""
        while self._line and len(self.holders) < self.places:
            self.holders.append(self._line.popleft())
        for before in [model for model in self.holders if not (model.waiting or self.adapters)]:
            heir = next((model for model in self._line if model.session_id == before.session_id), None)
            if heir:
                self._line.remove(heir)
                if self.places == 1:
                    many = "one is"
                else:
                    many = f"{self.places} are"
                reason = f"{heir.model_id} of the same session has its place now, and {many} trained at a time"
                self.end_model(before, reason)
                self.holders.append(heir)

    def trained(self, outcome: Outcome, now: float = 0.0) -> None:
        """Records the outcome of the running request. If the request was the creation of the model and failed, ends the
        model. The changed history of the model (the steps to repeat
        if the trainer dies) is committed together with the outcome."""
        promise = self.running
        assert promise, "only after next_training"
        model = self.models[promise.owner_id]
        number = promise.number
        if isinstance(outcome, Failure):
            error = outcome.error
        else:
            error = ""
        if number == 0 and error:
            self.end_model(model, f"it could not be created: {error}")
        before = model.history
        if model.failure:
            after = before
        else:
            after = before.noted(Step(number, promise.work, error), now)
        rows = [
            row_of(replace(promise, outcome=outcome)),
            step_row(promise.request_id, error) if number in after.numbers else work_key(promise.request_id),
            *self._removed_steps(model, before.numbers - after.numbers),
        ]
        self._change(model, *rows, next_seq=number + 1, history=after)
        self.running = None
        model.waiting.pop(number, None)
        self._has_outcome(promise, outcome)

    def saved(self, model: ClientModel, place: str) -> None:
        """Records that all steps of a model are saved in the checkpoint in the directory `place`."""
        after = model.history.saved(place)
        self._change(model, *self._removed_steps(model, model.history.numbers - after.numbers), history=after)

    # ---- sampling

    def create_sampler(self, session_id: str, seq: int, target: str) -> ClientSampler:
        """Begins a sampling session with the weights named `target`, and returns it; a repeated call returns the same
        one. Raises UnknownId if there is no such session of a client, and GoneError if that session has ended."""
        session = self.living(session_id)
        sampler_id = f"{session_id}:sample:{seq}"
        if sampler_id not in self.samplers:
            sampler = ClientSampler(sampler_id, session_id, target)
            self.write([row_of(sampler)])
            self.samplers[sampler_id] = sampler
            session.samplers.append(sampler_id)
        return self.samplers[sampler_id]

    def sample(self, sampler: ClientSampler, seq_id: int, work: object) -> Promise:
        """Accepts request number `seq_id` of a sampler, and returns its promise; a repeated request gets the same
        promise."""
        earlier = self.accepted(sampler.sampler_id, seq_id)
        if earlier:
            return earlier
        promise = self._accept(Promise(f"{sampler.sampler_id}/{seq_id}", sampler.session_id, work))
        self.turns.add(sampler.target, promise)
        return promise

    def sampled(self, promise: Promise, outcome: Outcome) -> None:
        """Records the outcome of a sample that ran, and tells the scheduler that the sample has ended."""
        self.settle(promise, outcome)
        self.turns.finish(promise)

    def sample_again(self, available: Collection[str], failure: Failure) -> None:
        """Puts all samples that have no outcome back in the queue, because the replicas that worked on them are gone.
        If a sample needs weights that are not in `available`, it is not queued and gets the outcome `failure`."""
        self.turns = self.make_turns()
        for promise in list(self.promises.values()):
            if promise.outcome is None and (sampler := self.samplers.get(promise.owner_id)):
                if sampler.target in available:
                    self.turns.add(sampler.target, promise)
                else:
                    self.settle(promise, failure)
