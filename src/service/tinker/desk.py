"""Accepts what clients ask a Tinker server for, and answers once it is done. The rooms do it elsewhere.

A request is in the journal before it is accepted. All of this runs in one event loop.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from service.tinker.asked import Creation, Unusable, Work, origin_of
from service.tinker.catalog import Catalog
from service.tinker.costs import tokens_of
from service.tinker.journal import TinkerJournal
from service.tinker.offer import TinkerOffer
from service.tinker.owners import Caller
from service.tinker.promises import Failure, Promise, SampleWork, Success, UnknownId, UserError
from service.tinker.records import Record
from service.tinker.replaying import Histories, records_of, replay
from service.tinker.shelf import BASE, WeightShelf
from service.tinker.state import ProtocolState
from service.tinker.turns import SampleTurns
from trireme.core.datum import ModelInput
from trireme.process.faults import fault_point

HOLD_S = 20.0
"""Seconds for which a question for an outcome is held; the client waits 45 s."""


class TinkerDesk:
    """The state, its journal, and those who wait."""

    def __init__(
        self, offer: TinkerOffer, catalog: Catalog, journal: TinkerJournal, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.offer, self.catalog, self.now = offer, catalog, now
        self._journal = journal
        self.state, self._histories = self._replay([])
        self._shelf = WeightShelf()
        self._outcomes: dict[str, asyncio.Event] = {}
        self._completions: dict[str, asyncio.Event] = {}
        self._to_train, self._to_sample = asyncio.Event(), asyncio.Event()
        self._closing = False
        self.ready = False
        """The rooms have what they had; before that nobody knows which weights they hold."""

    def _replay(self, records: Sequence[Record]) -> tuple[ProtocolState, Histories]:
        state = ProtocolState(
            make_turns=partial(SampleTurns[Promise], self.offer.slots, BASE),
            adapters=self.offer.lora is not None,
            places=self.offer.places,
            cost=tokens_of,
            origin=origin_of,
        )
        return state, replay(state, records, self.now())

    def begin(self) -> bool:
        """Reads the journal, and begins another one behind it. Returns True if an earlier server had begun it. Raises
        StorageFailed."""
        replayed = self._journal.replay()
        self.state, self._histories = self._replay(replayed.records)
        if replayed.lost:  # what clients were told may not be known here, so they begin again
            for session_id in self.state.sessions:
                self.state.finish(session_id, self.now())
        self.rewrite()
        self.state.write = self._journal.append
        return bool(replayed.records)

    def rewrite(self) -> None:
        self._journal.begin(records_of(self.state, self._histories))

    @property
    def base_model(self) -> str:
        """The name of the model that it serves."""
        return self.offer.served.names[0]

    @property
    def listed(self) -> tuple[str, ...]:
        """The names that clients are told when they ask for all models."""
        return (self.base_model, *self.offer.options.names)

    @property
    def told(self) -> str:
        """A sentence for clients whose session begins."""
        if (lora := self.offer.lora) is None:
            return "this server trains whole models: lora_config has no effect"
        without = "" if "lm_head" in lora.target_modules else "; train_unembed has no effect"
        return f"this server trains adapters up to rank {lora.rank} for {', '.join(lora.target_modules)}{without}"

    def serves(self, base_model: str | None) -> bool:
        """Tells whether `base_model` is a name of that model."""
        return base_model in self.offer.served.names

    def room(self, prompt: ModelInput, stop: Sequence[int]) -> int:
        """Returns how many tokens may follow a prompt. Raises UserError for one that the model cannot read, and for ids
        in `stop` that it cannot sample."""
        served, tokens = self.offer.served, prompt.tokens
        vocabulary, most = served.vocab_size, served.max_len
        if not len(tokens) or tokens.max() >= vocabulary:
            raise UserError(f"a prompt of {len(tokens)} tokens; expected at least one, all below {vocabulary}")
        if unknown := [token for token in stop if token >= vocabulary]:
            raise UserError(f"stop = {unknown[0]}; expected ids below {vocabulary}, the model's vocabulary")
        if len(tokens) >= most:
            raise UserError(f"a prompt of {len(tokens)} tokens; expected less than {most}, the context of the model")
        return most - len(tokens)

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


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
