"""The server without HTTP: it owns the state, lets the trainer and the replicas work, and wakes those who wait.

All of it runs in one event loop, where nothing waits for a room: verbs are called in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from service.front import ServedModels
from service.tinker.adapter_turns import AdapterTurns, DropWeights
from service.tinker.catalog import Catalog
from service.tinker.codec import encode_sample
from service.tinker.promises import ClientModel, Failure, Promise, Success, UserError
from service.tinker.state import ProtocolState, UnknownId
from service.tinker.turns import LoadWeights, StartSample
from service.tinker.verbs import SamplerVerbs
from service.tinker.work import Creation, Done, Saving, TrainingWorker, Unusable, Work, tokens_of
from trireme.core.datum import ModelInput
from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.types import SamplingParams
from trireme.core.weights import PublishedWeights

HOLD_S = 20.0
"""Seconds for which a question for an outcome is held; the client waits 45 s."""
LOOK_S = 5.0
BASE = "base"
SNAPSHOTS = 4
"""Sets of weights that are kept for samplers beside the base's, at least: those that are in use stay too."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleWork:
    """A prompt, and how to sample from it."""

    prompt: ModelInput
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool
    topk: int


class TinkerServer:
    """The server. `run` does the work until it is cancelled, or a room fails."""

    def __init__(
        self,
        worker: TrainingWorker,
        sampler: SamplerVerbs,
        catalog: Catalog,
        served: ServedModels,
        tokenizer_id: str,
        now: Callable[[], float] = time.monotonic,
        places: int = 1,
        slots: int = 0,
    ) -> None:
        """`places`: the number of models that are trained at the same time; 1 unless the worker has adapters. `slots`:
        the number of adapters that replicas hold at the same time beside the base; 0: they hold one set of weights."""
        self.state, self.catalog, self.served, self.now = ProtocolState(), catalog, served, now
        self.state.places, self.state.cost, self._slots = places, tokens_of, slots
        if slots:
            self.state.turns = AdapterTurns(slots, BASE)
        self.metadata: dict[str, Mapping[str, Any]] = {}
        """What clients said of their sessions, by session."""
        self._worker, self._sampler, self._tokenizer_id = worker, sampler, tokenizer_id
        self._shelf: OrderedDict[str, PublishedWeights] = OrderedDict()
        self._outcomes: dict[str, asyncio.Event] = {}
        self._completions: dict[str, asyncio.Event] = {}
        self._to_train, self._to_sample = asyncio.Event(), asyncio.Event()
        self._sampling: set[asyncio.Task[None]] = set()

    @property
    def base_model(self) -> str:
        """The name of the model that it serves."""
        return self._worker.bases[0]

    @property
    def told(self) -> str:
        """A sentence for clients whose session begins."""
        if (lora := self._worker.lora) is None:
            return "this server trains whole models: lora_config has no effect"
        without = "" if "lm_head" in lora.target_modules else "; train_unembed has no effect"
        return f"this server trains adapters up to rank {lora.rank} for {', '.join(lora.target_modules)}{without}"

    @property
    def tokenizer_id(self) -> str:
        """The tokenizer of that model: a directory, or a name on the hub."""
        return self._tokenizer_id

    def serves(self, base_model: str | None) -> bool:
        """Tells whether `base_model` is a name of that model."""
        return base_model in self._worker.bases

    def room(self, prompt: ModelInput) -> int:
        """Returns how many tokens may follow a prompt. Raises UserError for one that the model cannot read."""
        tokens, vocabulary, most = prompt.tokens, self.served.vocab_size, self.served.max_len
        if not len(tokens) or tokens.max() >= vocabulary:
            raise UserError(f"a prompt of {len(tokens)} tokens; expected at least one, all below {vocabulary}")
        if len(tokens) >= most:
            raise UserError(f"a prompt of {len(tokens)} tokens; expected less than {most}, the context of the model")
        return most - len(tokens)

    async def begin(self) -> None:
        """Prepares trainer and replicas. Raises TriremeError."""
        base = self._shelf[BASE] = await asyncio.to_thread(self._worker.begin)
        if self._slots:
            await asyncio.to_thread(self._sampler.update_weights, base)

    async def run(self) -> None:
        """Does what clients ask for. Raises TriremeError when a room has failed."""
        loops = (self._train(), self._sample(), self._look_after())
        tasks = [asyncio.create_task(each) for each in loops]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in (*tasks, *self._sampling):
                task.cancel()
            self.state.fail_all(
                Failure("the server has ended; continue from a saved state with the next one", "server")
            )
            self.wake()

    # ---- what clients ask for

    def begin_session(self, metadata: Mapping[str, Any]) -> str:
        """Begins a session, and returns its id."""
        session_id = uuid.uuid4().hex
        self.state.begin_session(session_id, self.now())
        self.metadata[session_id] = metadata
        return session_id

    def finish(self, session_id: str) -> None:
        """Ends a session. Raises UnknownId."""
        self.state.finish(session_id, self.now())
        self.wake()

    def create(self, session_id: str, model_seq: int, work: Creation) -> Promise:
        """Accepts a new model. Raises UnknownId, GoneError."""
        promise = self.state.create_model(session_id, model_seq, work)
        self.wake()
        return promise

    def train(self, model_id: str, seq_id: int, work: Work) -> Promise:
        """Accepts a request of a model. Raises UnknownId, UserError."""
        promise = self.state.train(model_id, seq_id, work)
        self.wake()
        return promise

    def take_number(self, model_id: object, seq_id: object, said: str) -> None:
        """Notes that a request of a model was refused, for which later ones would wait: the client counts it."""
        if isinstance(model_id, str) and isinstance(seq_id, int):
            with suppress(UnknownId, UserError):
                self.train(model_id, seq_id, Unusable(said))

    def sample(self, sampler_id: str, seq_id: int, work: SampleWork) -> Promise:
        """Accepts a sample. Raises UnknownId, and UserError where its weights are not held any more."""
        if not self.state.has_sample(sampler_id, seq_id):
            self._check_held(self.state.sampler(sampler_id).target)
        promise = self.state.sample(sampler_id, seq_id, work)
        self.wake()
        return promise

    def create_sampler(self, session_id: str, seq: int, model_path: str | None) -> str:
        """Begins a sampling session from the base, or from weights that were saved by name. Raises UnknownId,
        GoneError, UserError."""
        if model_path is not None:
            self.catalog.find(model_path, "sampler_weights")
            self._check_held(model_path)
        return self.state.create_sampler(session_id, seq, model_path or BASE).sampler_id

    def _check_held(self, target: str) -> None:
        if target not in self._shelf:
            raise UserError(
                f"the weights {target} are no longer in memory, where samplers need them: the server keeps the newest "
                f"{self._kept}, and none after a restart. Train from a saved state and save weights for samplers "
                "again, or serve the saved directory with `uv run inference`"
            )

    @property
    def _kept(self) -> int:
        """The number of sets of weights that are kept beside the base's and those in use."""
        return max(SNAPSHOTS, self._slots)

    async def outcome(self, promise: Promise) -> Success | Failure | None:
        """Returns the outcome of a promise, or None if there is none after HOLD_S."""
        if promise.outcome is None and not promise.forgotten:
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
            if done or self.now() >= until:
                return done, after
            event = self._completions.setdefault(sampler_id, asyncio.Event())
            await _within(event, until - self.now())

    def wake(self) -> None:
        """Lets all who wait look at what has changed."""
        for promise in self.state.take_settled():
            if event := self._outcomes.pop(promise.request_id, None):
                event.set()
            if event := self._completions.pop(promise.request_id.rpartition("/")[0], None):
                event.set()
        self._to_train.set()
        self._to_sample.set()

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
            work: Any = promise.work
            done = await asyncio.to_thread(self._worker.run, model.model_id, work)
            self.state.trained(self._with_weights(model, work, done))
            self.wake()
            if self._worker.failure:
                raise self._worker.failure

    def _with_weights(self, model: ClientModel, work: Saving, done: Done) -> Success | Failure:
        """Puts new weights, if there are any, where samplers find them, and makes the sampler that is to have them."""
        if done.published is None:
            return done.outcome
        assert isinstance(done.outcome, Success)
        assert isinstance(done.outcome.payload, dict)
        payload = dict(done.outcome.payload)
        if work.name is not None:
            target = str(payload["path"])
        else:
            assert work.sampler_seq is not None, "checked when it was accepted"
            snapshot = f"{model.model_id}/snapshot/{work.sampler_seq}"
            target = _following(model.model_id) if work.kind == "inflight" else snapshot
            if self.state.sessions[model.session_id].ended_s is not None:
                return model.refusal
            sampler = self.state.create_sampler(model.session_id, work.sampler_seq, target)
            payload["sampling_session_id"] = sampler.sampler_id
        self._shelve(target, done.published)
        return Success(payload)

    def _shelve(self, target: str, weights: PublishedWeights) -> None:
        self._shelf[target] = weights
        self._shelf.move_to_end(target)
        self.state.turns.renew(target)
        following = {_following(model_id) for model_id, model in self.state.models.items() if not model.ended}
        in_use = self.state.turns.wanted | following | {BASE}
        for name in [each for each in self._shelf if each not in in_use][: -self._kept]:
            del self._shelf[name]

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
            outcome = Failure(str(error), "server")
        except (TriremeError, ValueError) as error:
            outcome = Failure(str(error), "user")
        except Exception as error:  # else this client and those of other weights would wait for ever
            log.exception("a sample failed")
            outcome = Failure(f"an error of the server, which its log tells: {type(error).__name__}", "server")
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
                await asyncio.to_thread(self.catalog.expire)
            except Exception:  # of a disk, say; it is tried again, and nothing else depends on it
                log.exception("what has expired could not be deleted")
            await asyncio.sleep(LOOK_S)


def _following(model_id: str) -> str:
    """Returns the name of the weights of samplers that follow a model."""
    return f"{model_id}/inflight"


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
