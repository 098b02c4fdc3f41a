"""The server without HTTP: it accepts what clients ask for, lets the trainer and the replicas do it, and answers.

A request is in the store before it is accepted. All of this runs in one event loop, where nothing waits for a room:
verbs are called in threads.

Rooms come and go. `run` works with one trainer and one sampler until one of them is lost, and raises that; clients are
told meanwhile that their results are not there yet. The next call gives each model what it had
(`service.tinker.history`) and continues with what has no outcome. What a server that was killed had accepted is in its
store.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from service.store import Store
from service.tinker.asked import Creation, Saving, Unusable, Work, origin_of
from service.tinker.catalog import Catalog
from service.tinker.clients import ClientModel
from service.tinker.codec import encode_sample
from service.tinker.commits import OwnCommits
from service.tinker.costs import MeasuredCosts, tokens_of
from service.tinker.offer import TinkerOffer
from service.tinker.owners import Caller
from service.tinker.promises import Failure, Promise, SampleWork, Success, UnknownId, UserError
from service.tinker.rows import write
from service.tinker.shelf import BASE, WeightShelf, following, target_of
from service.tinker.state import ProtocolState
from service.tinker.turns import DropWeights, LoadWeights, SampleTurns, StartSample
from service.tinker.verbs import SamplerVerbs
from service.tinker.work import Done, NotRestored, TrainingWorker
from trireme.core.errors import RoomFailed, StorageFailed, TriremeError
from trireme.core.weights import PublishedWeights
from trireme.process.faults import fault_point

HOLD_S = 20.0
"""Seconds for which a question for an outcome is held; the client waits 45 s."""
LOOK_S = 5.0
TRIES = 2
"""So often a request is tried whose rooms are lost while they work on it; then it has failed: it may be the cause."""
LOST_WEIGHTS = Failure(
    "the weights of this sampler were in memory only, and were lost when the server or one of its rooms was started "
    "again; save weights for samplers again",
    "server",
)
log = logging.getLogger(__name__)


class TinkerServer:
    """The server. Call `begin` once, then `run` with rooms, and again with others when these are lost."""

    def __init__(
        self,
        offer: TinkerOffer,
        catalog: Catalog,
        store: Store,
        commits: OwnCommits,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`store`: where the state is kept. `commits`: where models are saved by the server itself."""
        self.offer, self.catalog, self.now = offer, catalog, now
        self.state = ProtocolState(
            make_turns=partial(SampleTurns[Promise], offer.slots, BASE),
            adapters=offer.lora is not None,
            places=offer.places,
            cost=tokens_of,
            origin=origin_of,
        )
        self._store, self._commits = store, commits
        self._shelf = WeightShelf()
        self._outcomes: dict[str, asyncio.Event] = {}
        self._completions: dict[str, asyncio.Event] = {}
        self._to_train, self._to_sample = asyncio.Event(), asyncio.Event()
        self._sampling: set[asyncio.Task[None]] = set()
        self._costs = MeasuredCosts()
        self._closing = False
        self.ready = False
        """The rooms have what they had; before that nobody knows which weights they hold."""
        self.done = 0
        """How many requests to train were done."""

    def begin(self) -> bool:
        """Opens the store, and continues with what it has. Returns True if an earlier server has left something. Raises
        StorageFailed."""
        lost = self._store.open()
        self.state.write = partial(write, self._store)
        self.state.load(self._store.rows(), self.now())
        if lost:  # what clients were told may not be known here, so they begin again
            for session_id in self.state.sessions:
                self.state.finish(session_id, self.now())
            self._store.note_boot()
        fault_point("tinker.begun")
        return bool(self.state.sessions)

    # ---- what clients ask for

    def begin_session(self, owner: str, metadata: Mapping[str, Any]) -> str:
        """Begins a session of the key `owner`, and returns its id. Raises StorageFailed."""
        session_id = uuid.uuid4().hex
        self.state.begin_session(session_id, self.now(), owner, metadata)
        return session_id

    def said(self, session_id: str) -> Mapping[str, Any]:
        """Returns what a client said of its session; nothing of one that this server does not know."""
        session = self.state.sessions.get(session_id)
        return session.metadata if session else {}

    def finish(self, session_id: str) -> None:
        """Ends a session. Raises UnknownId."""
        self.state.finish(session_id, self.now())
        self.wake()

    def create(self, session_id: str, model_seq: int, work: Creation) -> Promise:
        """Accepts a new model. Raises UnknownId, GoneError, StorageFailed."""
        promise = self.state.create_model(session_id, model_seq, work)
        self.wake()
        return promise

    def train(self, model_id: str, seq_id: int, work: Work) -> Promise:
        """Accepts a request of a model. Raises UnknownId, UserError."""
        fault_point("tinker.ask")
        promise = self.state.train(model_id, seq_id, work)
        self.state.heard(promise, self.now())
        fault_point("tinker.asked")
        self.wake()
        return promise

    def take_number(self, model_id: object, seq_id: object, said: str) -> None:
        """Notes that a request of a model was refused, for which later ones would wait: the client counts it."""
        if isinstance(model_id, str) and isinstance(seq_id, int):
            with suppress(UnknownId, UserError):
                self.train(model_id, seq_id, Unusable(said))

    def sample(self, sampler_id: str, seq_id: int, work: SampleWork) -> Promise:
        """Accepts a sample. Raises UnknownId, and UserError where its weights are not held any more."""
        sampler = self.state.sampler(sampler_id)
        if not self.state.has_asked(sampler_id, seq_id):
            self._check_held(sampler.target)
        promise = self.state.sample(sampler_id, seq_id, work)
        self.wake()
        return promise

    def create_sampler(self, session_id: str, seq: int, model_path: str | None, caller: Caller) -> str:
        """Begins a sampling session from the base, or from weights that were saved by name and that `caller` may read.
        Raises UnknownId, GoneError, UserError."""
        if model_path is not None:
            self.catalog.find(model_path, "sampler_weights", caller)
            self._check_held(model_path)
        return self.state.create_sampler(session_id, seq, model_path or BASE).sampler_id

    def _check_held(self, target: str) -> None:
        if self.ready and target not in self._shelf:
            raise UserError(
                f"the weights {target} are no longer in memory, where samplers need them: the server keeps the newest "
                f"{self.offer.kept} (service.tinker.snapshots), and none after a restart. Train from a saved state and "
                "save weights for samplers again, or serve the saved directory with `uv run inference`"
            )

    async def outcome(self, promise: Promise) -> Success | Failure | None:
        """Returns the outcome of a promise, or None if there is none after HOLD_S."""
        self.state.heard(promise, self.now())
        if promise.outcome is None and not promise.forgotten and not self._closing:
            event = self._outcomes.setdefault(promise.request_id, asyncio.Event())
            await _within(event, HOLD_S)
        return self.state.give(promise, self.now())

    async def completions(
        self, sampler_id: str, clone: int, cursor: int, retrieved: list[str], timeout_s: float | None
    ) -> tuple[list[Promise], int]:
        """Returns what was sampled after `cursor`; waits for it, at most `timeout_s`. Raises UnknownId."""
        until = self.now() + min(HOLD_S if timeout_s is None else timeout_s, HOLD_S)
        while True:
            done, after = self.state.completions(sampler_id, clone, cursor, retrieved)
            if done or self.now() >= until or self._closing:
                return done, after
            event = self._completions.setdefault(sampler_id, asyncio.Event())
            await _within(event, until - self.now())

    def release(self) -> None:
        """Answers all who wait with what there is: the server ends."""
        self._closing = True
        for event in (*self._outcomes.values(), *self._completions.values()):
            event.set()

    def wake(self) -> None:
        """Lets all who wait look at what has changed."""
        for promise in self.state.take_settled():
            if event := self._outcomes.pop(promise.request_id, None):
                event.set()
            if event := self._completions.pop(promise.owner_id, None):
                event.set()
        self._to_train.set()
        self._to_sample.set()

    # ---- rooms

    async def run(self, worker: TrainingWorker, sampler: SamplerVerbs) -> None:
        """Does what clients ask for with these rooms. Raises TriremeError: RoomFailed when they are lost."""
        self._worker, self._sampler = worker, sampler
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._restore()
            tasks = [asyncio.create_task(each) for each in (self._train(), self._sample(), self._look_after())]
            await asyncio.gather(*tasks, self._lost)
        finally:
            self.ready = False
            worker.close()
            for task in (*tasks, *self._sampling):
                task.cancel()

    async def _restore(self) -> None:
        """Gives trainer and replicas what they had. Raises TriremeError."""
        base = await asyncio.to_thread(self._worker.begin)
        self._shelf = WeightShelf({BASE: base})
        if self.offer.slots:
            await asyncio.to_thread(self._sampler.update_weights, base)
        await self._remove_old_commits()
        for model in [each for each in self.state.models.values() if each.next_seq and not each.ended]:
            try:
                await self._restore_model(model)
            except NotRestored as error:
                why = (
                    f"the trainer was lost, and this model could not be restored ({error}); continue from a saved state"
                )
                self.state.end_model(model.model_id, why)
        self.state.line_up()
        self.state.sample_again(self._shelf.keys(), LOST_WEIGHTS)
        self.ready = True
        self.wake()

    async def _restore_model(self, model: ClientModel) -> None:
        history = model.history
        if history.place:
            directory = self._commits.directory(history.place)
            await asyncio.to_thread(self._worker.load_commit, model.model_id, directory)
        for step in history.kept():
            fault_point("tinker.restore")
            published = await asyncio.to_thread(self._worker.again, model.model_id, step.work, step.error)
            if published and isinstance(step.work, Saving):
                self._shelve(target_of(model.model_id, step.work), published)
        target = following(model.model_id)
        if target not in self._shelf and any(each.target == target for each in self.state.samplers.values()):
            self._shelve(target, await asyncio.to_thread(self._worker.publish, model.model_id))

    # ---- the work

    async def _train(self) -> None:
        while True:
            self._to_train.clear()
            for model_id in self.state.take_ended():
                await asyncio.to_thread(self._worker.forget, model_id)
            if (found := self.state.next_training()) is None:
                await self._to_train.wait()
                continue
            model, promise = found
            fault_point("tinker.train")
            began_s = self.now()
            work: Any = promise.work
            done = await asyncio.to_thread(self._worker.run, model.model_id, work, promise.request_id)
            fault_point("tinker.trained")
            if (failure := self._worker.failure) and self._may_try_again(promise):
                raise failure
            self._note(model, promise, done, self.now() - began_s)
            self.done += 1
            self.wake()
            if failure:
                raise failure
            if not model.ended and model.history.is_due(self.now(), self.offer.options.commit_s):
                await self._commit(model)

    def _note(self, model: ClientModel, promise: Promise, done: Done, took_s: float) -> None:
        """Notes what the trainer has done for a model in `took_s` seconds."""
        work: Any = promise.work
        outcome = self._with_weights(model, work, done)
        self.state.trained(outcome, self._costs.done(work, took_s), self.now())
        fault_point("tinker.told")

    def _may_try_again(self, promise: Promise) -> bool:
        """Notes that rooms were lost that worked on a request. Returns False if it is not to be tried again."""
        return self.state.lose(promise) < TRIES

    async def _commit(self, model: ClientModel) -> None:
        """Saves a model for this server itself. A disk that is full only lets more be done again later."""
        place = await asyncio.to_thread(self._commits.begin, model.model_id, model.next_seq)
        fault_point("tinker.commit")
        try:
            await asyncio.to_thread(self._worker.commit, model.model_id, self._commits.directory(place))
        except StorageFailed:
            log.exception("the server could not save a model for itself")
            model.history = replace(model.history, began_s=self.now())
            return
        fault_point("tinker.commit.written")
        self.state.committed(model, place)
        fault_point("tinker.commit.told")
        await self._remove_old_commits()

    async def _remove_old_commits(self) -> None:
        """Removes the server's own saves with which no model would begin again."""
        kept = {each.history.place for each in self.state.models.values() if not each.ended}
        await asyncio.to_thread(self._commits.remove, kept)

    def _with_weights(self, model: ClientModel, work: Saving, done: Done) -> Success | Failure:
        """Puts new weights, if there are any, where samplers find them, and makes the sampler that is to have them."""
        if done.published is None:
            return done.outcome
        assert isinstance(done.outcome, Success)
        assert isinstance(done.outcome.payload, dict)
        payload, target = dict(done.outcome.payload), target_of(model.model_id, work)
        if work.name is None:
            assert work.sampler_seq is not None, "checked when it was accepted"
            if self.state.sessions[model.session_id].ended_s is not None:
                return model.refusal
            sampler = self.state.create_sampler(model.session_id, work.sampler_seq, target)
            payload["sampling_session_id"] = sampler.sampler_id
        self._shelve(target, done.published)
        return Success(payload)

    def _shelve(self, target: str, weights: PublishedWeights) -> None:
        self.state.turns.renew(target)
        followed = {following(model_id) for model_id, model in self.state.models.items() if not model.ended}
        self._shelf.put(target, weights, self.state.turns.wanted | followed, self.offer.kept)

    async def _sample(self) -> None:
        while True:
            self._to_sample.clear()
            match self.state.turns.next():
                case LoadWeights(name, ""):
                    await asyncio.to_thread(self._sampler.update_weights, self._shelf[name])
                case LoadWeights(name, slot):
                    await asyncio.to_thread(self._sampler.load_adapter, slot, self._shelf[name])
                case DropWeights(slot):
                    await asyncio.to_thread(self._sampler.drop_adapter, slot)
                case StartSample(promise, slot):
                    self._spawn(self._answer(promise, slot))
                case None:
                    await self._to_sample.wait()

    async def _answer(self, promise: Promise, slot: str) -> None:
        work = promise.work
        assert isinstance(work, SampleWork)
        try:
            asked = (work.prompt, work.num_samples, work.params, work.prompt_logprobs, work.topk)
            response = await asyncio.wrap_future(self._sampler.sample(*asked, adapter=slot))
            outcome: Success | Failure = Success(encode_sample(response, work.topk))
        except RoomFailed as error:
            if self._may_try_again(promise):
                if not self._lost.done():
                    self._lost.set_exception(error)
                return
            outcome = Failure(f"replicas were lost twice while they sampled this: {error}", "server")
        except (TriremeError, ValueError) as error:
            outcome = Failure(str(error), "user")
        except Exception as error:  # else this client and those of other weights would wait for ever
            log.exception("a sample failed")
            outcome = Failure(f"an error of the server, which its log tells: {type(error).__name__}", "server")
        fault_point("tinker.sampled")
        self.state.sampled(promise, outcome)
        self.wake()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._sampling.add(task)
        task.add_done_callback(self._sampling.discard)

    async def _look_after(self) -> None:
        while True:
            self.state.expire(self.now())
            self.wake()
            try:
                await self._remove_old_commits()
                await asyncio.to_thread(self.catalog.expire)
            except Exception:  # of a disk, say; it is tried again, and nothing else depends on it
                log.exception("what has expired could not be deleted")
            await asyncio.sleep(LOOK_S)


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
