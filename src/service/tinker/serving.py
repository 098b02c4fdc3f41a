"""The Tinker server without HTTP: accepts clients' requests, passes them to the trainer and the replicas, and answers.

A request is in the store before it is accepted. All of this runs in one event loop, which never waits for a room:
methods of rooms are called in threads.

Rooms come and go. `run` works with one trainer and one sampler; if one of them is lost, `run` raises RoomFailed. Until
`run` is called again, the server answers that results are not there yet. The next call of `run` restores each model
(`service.tinker.model_history`) and continues with the requests that have no outcome. The store has the requests that a
killed server had accepted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from service.requests import RequestRefused
from service.store import Store
from service.tinker.bodies import SaveForSamplerBody, Work
from service.tinker.catalog import Catalog
from service.tinker.checkpoints import OwnCheckpoints
from service.tinker.clients import ClientModel, ClientSampler
from service.tinker.codec import encode_sample
from service.tinker.owners import SERVER, Caller
from service.tinker.promises import Failure, Outcome, Promise, SampleWork, Success
from service.tinker.rows import write
from service.tinker.sample_scheduler import DropWeights, LoadWeights, SampleScheduler, StartSample
from service.tinker.served_model import ServedTinkerModel
from service.tinker.state import MACHINE, ProtocolState
from service.tinker.verbs import SamplerVerbs
from service.tinker.weight_cache import BASE, WeightCache, following, target_of
from service.tinker.work import NotRestored, TrainingWorker, failure_of
from trireme.core.errors import RoomFailed, StorageFailed, TriremeError
from trireme.core.weights import PublishedWeights
from trireme.process.faults import fault_point

HOLD_S = 20.0
"""Seconds for which the server holds a request for an outcome that is not there yet; the client waits 45 s."""
LOOK_S = 5.0
TRIES = 2
"""How often a request is tried when rooms are lost while they work on it. Then it has failed, because it may be the
cause."""
LOST_WEIGHTS = Failure(
    "the weights of this sampler were in memory only, and were lost when the server or one of its rooms was started "
    "again; save weights for samplers again",
    "server",
)
log = logging.getLogger(__name__)


class TinkerServer:
    """Serves the protocol's requests. Call `begin` once, then `run` with a trainer and a sampler, and `run` again with
    new ones after these are lost."""

    def __init__(
        self,
        offer: ServedTinkerModel,
        catalog: Catalog,
        store: Store,
        checkpoints: OwnCheckpoints,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`store`: keeps the protocol's state. `checkpoints`: the directories in which the server saves models for
        itself. `now`: a monotonic clock, in seconds."""
        self.offer = offer
        self.catalog = catalog
        self.now = now
        self.state = ProtocolState(
            make_turns=partial(SampleScheduler, offer.slots, BASE),
            adapters=offer.lora is not None,
            places=offer.places,
            changed=self._changed,
        )
        self._store = store
        self._checkpoints = checkpoints
        self._weight_cache = WeightCache()
        self._waiting: dict[str, asyncio.Event] = {}  # by the ids of promises
        self._to_train = asyncio.Event()
        self._to_sample = asyncio.Event()
        self._sampling: set[asyncio.Task[None]] = set()
        self._closing = False
        self.ready = False
        """True once the rooms have their former state again; before that, it is unknown which weights they have."""
        self.trained = 0
        """The number of requests to models that the trainer has done."""

    def begin(self) -> str:
        """Opens the store, and restores the state in it. Returns a message for the user on the state that an earlier
        server left; "" if it left none. Raises StorageFailed if the store cannot be opened or read."""
        lost = self._store.open()
        self.state.write = partial(write, self._store)
        self.state.load(self._store.rows(), self.now())
        if lost:
            self.state.finish_all(self.now())
            self._store.note_boot()
        fault_point("tinker.begun")
        if not self.state.sessions:
            return ""
        if lost:
            return f"all sessions have ended: {MACHINE}"
        return "what clients had asked for is continued"

    # ---- what clients ask for

    def train(self, model_id: str, seq_id: int, work: Work, caller: Caller = SERVER) -> Promise:
        """Accepts request number `seq_id` of a model, and returns its promise. Raises UnknownId if there is no such
        model, RequestRefused for a number below 1, and StorageFailed."""
        fault_point("tinker.ask")
        promise = self.state.train(model_id, seq_id, work, caller)
        self.state.heard(promise, self.now())
        fault_point("tinker.asked")
        return promise

    def sample(self, sampler: ClientSampler, seq_id: int, work: SampleWork) -> Promise:
        """Accepts request number `seq_id` of a sampler, and returns its promise. Raises RequestRefused if the sampler's
        weights are no longer in memory, and StorageFailed."""
        if not self.state.accepted(sampler.sampler_id, seq_id):
            self.check_held(sampler.target)
        return self.state.sample(sampler, seq_id, work)

    def check_held(self, target: str) -> None:
        """Raises RequestRefused if the weights named `target` are no longer in memory for samplers."""
        if self.ready and target not in self._weight_cache:
            raise RequestRefused(
                f"the weights {target} are no longer in memory, where samplers need them: the server keeps the newest "
                f"{self.offer.cached_sets} (service.tinker.snapshots), and none after a restart. Train from a saved "
                "state and save weights for samplers again, or serve the saved directory with `uv run inference`"
            )

    async def outcome(self, promise: Promise) -> Outcome | None:
        """Waits at most HOLD_S seconds for the outcome of a promise (an accepted request), and returns it; None if
        there is none by then."""
        self.state.heard(promise, self.now())
        if promise.outcome is None and not promise.forgotten:
            await self._wait(promise.request_id)
        return self.state.give(promise, self.now())

    async def _wait(self, request_id: str) -> None:
        if not self._closing:
            event = self._waiting.setdefault(request_id, asyncio.Event())
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), HOLD_S)

    def release(self) -> None:
        """Ends all waits for outcomes: each waiting call returns immediately, with the results that exist by then.
        Later calls do not wait. Called when the server ends."""
        self._closing = True
        self._changed(*self._waiting)

    def _changed(self, *names: str) -> None:
        """Wakes the calls that wait for the promises with the ids `names`, and the loops that train and sample."""
        for name in names:
            event = self._waiting.pop(name, None)
            if event:
                event.set()
        self._to_train.set()
        self._to_sample.set()

    # ---- rooms

    async def run(self, worker: TrainingWorker, sampler: SamplerVerbs) -> None:
        """Runs clients' requests with this trainer and sampler until one of the two dies, and then raises RoomFailed.
        Raises another TriremeError if the state cannot be restored or stored."""
        self._worker = worker
        self._sampler = sampler
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._restore()
            tasks = [
                asyncio.create_task(coroutine) for coroutine in (self._train(), self._sample(), self._look_after())
            ]
            await asyncio.gather(*tasks, self._lost)
        finally:
            self.ready = False
            worker.close()
            for task in (*tasks, *self._sampling):
                task.cancel()

    async def _restore(self) -> None:
        """Restores, from the protocol's state, all models in the trainer and all weights for samplers. Ends models that
        cannot be restored. Raises TriremeError."""
        base = await asyncio.to_thread(self._worker.begin)
        self._weight_cache = WeightCache({BASE: base})
        if self.offer.slots:
            await asyncio.to_thread(self._sampler.update_weights, base)
        await self._remove_old_checkpoints()
        for model in [
            candidate for candidate in self.state.models.values() if candidate.next_seq and not candidate.failure
        ]:
            try:
                await self._restore_model(model)
            except NotRestored as error:
                reason = (
                    f"the trainer was lost, and this model could not be restored ({error}); continue from a saved state"
                )
                self.state.end_model(model, reason, "server")
        self.state.line_up()
        self.state.sample_again(self._weight_cache.keys(), LOST_WEIGHTS)
        self.ready = True

    async def _restore_model(self, model: ClientModel) -> None:
        history = model.history
        caller = self.state.sessions[model.session_id].caller
        if history.place:
            directory = self._checkpoints.directory(history.place)
            await asyncio.to_thread(self._worker.load_checkpoint, model.model_id, directory)
        for step in history.all_steps():
            fault_point("tinker.restore")
            published = await asyncio.to_thread(self._worker.again, model.model_id, step.work, step.error, caller)
            if published and isinstance(step.work, SaveForSamplerBody):
                self._shelve(target_of(model.model_id, step.work), published)
        target = following(model.model_id)
        has_follower = any(sampler.target == target for sampler in self.state.samplers.values())
        if has_follower and target not in self._weight_cache:
            self._shelve(target, await asyncio.to_thread(self._worker.publish, model.model_id))

    # ---- the work

    async def _train(self) -> None:
        while True:
            self._to_train.clear()
            living = {model_id for model_id, model in self.state.models.items() if not model.failure}
            for model_id in [candidate for candidate in self._worker.models if candidate not in living]:
                await asyncio.to_thread(self._worker.forget, model_id)
            turn = self.state.next_training()
            if turn is None:
                await self._to_train.wait()
                continue
            model, promise = turn
            fault_point("tinker.train")
            work: Any = promise.work
            caller = self.state.sessions[model.session_id].caller
            outcome, published = await asyncio.to_thread(
                self._worker.run, model.model_id, work, caller, promise.request_id
            )
            fault_point("tinker.trained")
            failure = self._worker.failure
            if failure and self.state.lose(promise) < TRIES:
                raise failure
            if published:
                outcome = self._with_weights(model, work, outcome, published)
            self.state.trained(outcome, self.now())
            fault_point("tinker.told")
            self.trained += 1
            if failure:
                raise failure
            if not model.failure and model.history.is_due(self.now(), self.offer.options.commit_s):
                await self._checkpoint(model)

    async def _checkpoint(self, model: ClientModel) -> None:
        """Saves a checkpoint of a model for the server itself. If the files cannot be written (a full disk, for
        example), only logs the error: without this checkpoint, more steps must be repeated if the trainer is lost."""
        place = await asyncio.to_thread(self._checkpoints.begin, model.model_id, model.next_seq)
        fault_point("tinker.commit")
        try:
            await asyncio.to_thread(self._worker.checkpoint, model.model_id, self._checkpoints.directory(place))
        except StorageFailed:
            log.exception("the server could not save a model for itself")
            model.history = replace(model.history, began_s=self.now())
            return
        fault_point("tinker.commit.written")
        self.state.saved(model, place)
        fault_point("tinker.commit.told")
        await self._remove_old_checkpoints()

    async def _remove_old_checkpoints(self) -> None:
        """Removes the checkpoints that the server took for itself and that no model needs after a restart."""
        retained = {model.history.place for model in self.state.models.values() if not model.failure}
        await asyncio.to_thread(self._checkpoints.remove, retained)

    def _with_weights(
        self, model: ClientModel, work: SaveForSamplerBody, outcome: Outcome, published: PublishedWeights
    ) -> Outcome:
        """Adds published weights to the cache for samplers. If the request wants a new sampler for these weights,
        begins this sampler, and returns an outcome with its id; else returns `outcome`. If a sampler is wanted but the
        model and its session have ended, returns the model's failure."""
        target = target_of(model.model_id, work)
        if work.sampling_session_seq_id is not None:
            if model.failure and self.state.sessions[model.session_id].end_reason:
                return model.failure
            sampler = self.state.create_sampler(model.session_id, work.sampling_session_seq_id, target)
            outcome = Success({"sampling_session_id": sampler.sampler_id, "type": "save_weights_for_sampler"})
        self._shelve(target, published)
        return outcome

    def _shelve(self, target: str, weights: PublishedWeights) -> None:
        self.state.turns.renew(target)
        followed = {following(model_id) for model_id, model in self.state.models.items() if not model.failure}
        self._weight_cache.put(target, weights, self.state.turns.needed | followed, self.offer.cached_sets)

    async def _sample(self) -> None:
        while True:
            self._to_sample.clear()
            match self.state.turns.next():
                case LoadWeights(name, ""):
                    await asyncio.to_thread(self._sampler.update_weights, self._weight_cache[name])
                case LoadWeights(name, slot):
                    await asyncio.to_thread(self._sampler.load_adapter, slot, self._weight_cache[name])
                case DropWeights(slot):
                    await asyncio.to_thread(self._sampler.drop_adapter, slot)
                case StartSample(promise, slot):
                    self._spawn(self._answer(promise, slot))
                case None:
                    await self._to_sample.wait()

    async def _answer(self, promise: Promise, slot: str) -> None:
        work = promise.work
        assert isinstance(work, SampleWork)
        outcome: Outcome
        try:
            request = (work.prompt, work.num_samples, work.params, work.prompt_logprobs, work.topk)
            response = await asyncio.wrap_future(self._sampler.sample(*request, adapter=slot))
            outcome = Success(encode_sample(response, work.topk))
        except Exception as error:  # else this client and those of other weights would wait for ever
            if isinstance(error, RoomFailed) and self.state.lose(promise) < TRIES:
                self._end(error)
                return
            outcome = failure_of(error)
        fault_point("tinker.sampled")
        try:
            self.state.sampled(promise, outcome)
        except StorageFailed as error:  # else its client would wait for ever; the next server samples it again
            self._end(error)

    def _end(self, error: TriremeError) -> None:
        """Makes `run` raise `error`. If this is called several times, `run` raises the error of the first call."""
        if not self._lost.done():
            self._lost.set_exception(error)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._sampling.add(task)
        task.add_done_callback(self._sampling.discard)

    async def _look_after(self) -> None:
        while True:
            self.state.expire(self.now())
            try:
                await self._remove_old_checkpoints()
                await asyncio.to_thread(self.catalog.expire)
            except Exception:  # of a disk, say; it is tried again, and nothing else depends on it
                log.exception("what has expired could not be deleted")
            await asyncio.sleep(LOOK_S)
