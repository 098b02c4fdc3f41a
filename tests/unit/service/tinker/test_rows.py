"""The state that is loaded from its rows is the state, whatever happened, and whichever write failed."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_posts import passing

from service.requests import RequestRefused
from service.store import Row, Store
from service.tinker.bodies import (
    AdamBody,
    CreateModelBody,
    LoadModelBody,
    LoadWeightsBody,
    LoraBody,
    OptimStepBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveStateBody,
    Unusable,
    Work,
)
from service.tinker.codec import ForwardBackwardCall
from service.tinker.model_history import ModelHistory, Step
from service.tinker.owners import Caller
from service.tinker.promise_book import ENDED_S
from service.tinker.promises import Failure, Outcome, Promise, SampleWork, Success
from service.tinker.rows import FORMAT, Change, Contents, write
from service.tinker.sample_scheduler import StartSample
from service.tinker.state import KEPT_S, ProtocolState
from trireme.core.datum import ModelInput
from trireme.core.errors import DiskFull
from trireme.core.types import SamplingParams

COPY = 10**9
"""The number of the first sample of a copy of a sampler."""
FAILED = Failure("no", "user")
PASS = ForwardBackwardCall.of(passing("s:train:0", 1))
NUMBER: dict[str, Any] = {"model_id": "s:train:0", "seq_id": 1}
SAVING = {**NUMBER, "ttl_seconds": 5, "overwrite": True, "user_metadata": {"a": "b"}}
UPDATE = OptimStepBody(**NUMBER, adam_params=AdamBody(beta1=0.5))
NEW: dict[str, Any] = {"session_id": "s", "model_seq_id": 0, "base_model": "m", "user_metadata": {"a": 1}}
CREATION = CreateModelBody(**NEW, lora_config=LoraBody(rank=4, seed=3))
LOADING = LoadWeightsBody(**NUMBER, path="tinker://p", optimizer=True)
SNAPSHOT = SaveForSamplerBody(**NUMBER, sampling_session_seq_id=3)
STATE = SaveStateBody(**SAVING, path="x")
SAMPLE = SampleWork(ModelInput([1, 2]), 2, SamplingParams(max_tokens=3, stop=[4, "x"], seed=7), True, 5)
WORKS: list[Work] = [CREATION, LOADING, PASS, UPDATE, SNAPSHOT, STATE, Unusable(error="why")]
WORKS += [LoadModelBody(**NEW, path="tinker://p", optimizer=False), SaveExternalBody(**SAVING, path="x")]


def work_read(work: Any) -> Any:
    """Returns a request as it is read from its row."""
    state = ProtocolState()
    rows: list[Change] = []
    state.write = rows.extend
    state.begin_session("s", 0.0)
    state.create_model("s", 0, CREATION)
    state.train("s:train:0", 1, work)
    contents = Contents()
    contents.read([row for row in rows if isinstance(row, Row)], 0.0)
    return contents.promises["s:train:0/1"].work


@pytest.mark.parametrize("work", WORKS, ids=lambda work: type(work).__name__)
def test_work_is_read_as_it_was_written(work: Any) -> None:
    restored = work_read(work)
    if isinstance(work, ForwardBackwardCall):
        assert isinstance(restored, ForwardBackwardCall)
        assert restored.encoded == work.encoded
    else:
        assert restored == work


def test_a_sample_is_read_as_it_was_written() -> None:
    restored = work_read(SAMPLE)
    np.testing.assert_array_equal(restored.prompt.tokens, [1, 2])
    assert (restored.params, restored.num_samples, restored.topk) == (SAMPLE.params, 2, 5)


def test_what_is_done_again_is_what_made_the_weights() -> None:
    """Passes whose gradients were dropped are not, nor what only looked."""
    history, success = ModelHistory(), Success({})
    forward = ForwardBackwardCall("m", 1, True, "cross_entropy", {}, None)
    outcomes: list[tuple[Work, Outcome]] = [
        (CREATION, success),
        (PASS, success),
        (forward, success),
        (STATE, success),
        (PASS, FAILED),
        (UPDATE, FAILED),
        (PASS, success),
        (UPDATE, success),
        (SNAPSHOT, success),
        (SNAPSHOT, FAILED),
        (PASS, success),
        (PASS, FAILED),
    ]
    for seq, (work, outcome) in enumerate(outcomes):
        error = outcome.error if isinstance(outcome, Failure) else ""
        history = history.noted(Step(seq, work, error), float(seq))
    assert [step.seq for step in history.all_steps()] == [0, 6, 7, 8, 10, 11]
    assert [step.error for step in history.all_steps()] == ["", "", "", "", "", "no"]
    assert not history.is_due(100.0, 1.0), "gradients are held"
    history = history.noted(Step(12, UPDATE, "no"), 12.0)
    assert not history.is_due(50.0, 60.0)
    assert not history.is_due(60.0, 60.0), "a checkpoint would let go of the snapshot, which may be sampled from now"
    history = history.noted(Step(13, UPDATE), 13.0)
    assert not history.is_due(50.0, 60.0)
    assert history.is_due(60.0, 60.0)
    history = history.saved("place")
    assert list(history.all_steps()) == []
    assert not history.is_due(1000.0, 1.0), "nothing was done since"
    history = history.noted(Step(14, LOADING), 14.0)
    assert history.is_due(14.0, 60.0), "its client may delete that state"


class Kept:
    """A state in a store. `fails`: the next write does, as on a disk that is full."""

    def __init__(self, directory: Path) -> None:
        self.store = Store(directory, FORMAT)
        self.store.open()
        self.state = ProtocolState()
        self.state.write = self.write
        self.fails = False

    def write(self, changes: Sequence[Change]) -> None:
        if self.fails:
            self.fails = False
            raise DiskFull("no space left")
        write(self.store, changes)

    def loaded(self, now: float) -> ProtocolState:
        state = ProtocolState()
        state.load(self.store.rows(), now)
        return state


def contents_of(state: ProtocolState) -> dict[str, Any]:
    """All that clients, and who does the work, can see of a state."""
    return {
        "sessions": {
            s.session_id: (s.caller, s.end_reason, s.models, s.samplers, s.metadata) for s in state.sessions.values()
        },
        "models": {
            m.model_id: (
                m.next_seq,
                m.failure,
                sorted(m.waiting),
                m.history.place,
                [(step.seq, step.error) for step in m.history.steps],
                [(step.seq, step.error) for step in m.history.batch],
            )
            for m in state.models.values()
        },
        "samplers": {s.sampler_id: (s.target, s.retired) for s in state.samplers.values()},
        "promises": {p.request_id: (p.outcome, p.losses) for p in state.promises.values()},
    }


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_state_is_loaded_as_it_was_whatever_happened_and_whichever_write_failed(data: st.DataObject) -> None:
    with TemporaryDirectory() as directory:
        stored = Kept(Path(directory))
        try:
            play(stored, data)
        finally:
            stored.store.close()


def play(stored: Kept, data: st.DataObject) -> None:
    state, now = stored.state, 0.0
    running: list[Promise] = []

    def number() -> int:
        return data.draw(st.integers(0, 5))

    def train() -> None:
        if state.running or state.next_training():
            assert state.running
            outcome = data.draw(st.sampled_from([Success({"a": [1]}), Success(b"x"), FAILED]))
            model = state.models[state.running.owner_id]
            state.trained(outcome, now)
            if data.draw(st.booleans()) and model.history.is_due(now + 1e6, 1.0):
                state.saved(model, f"place-{model.next_seq}")

    def sample() -> None:
        while step := state.turns.next():
            if isinstance(step, StartSample):
                running.append(step.item)
        if running and data.draw(st.booleans()):
            state.sampled(running[0], Success(b"sampled"))
            running.pop(0)

    def fetch() -> None:
        for promise in state.promises.values():
            if promise.outcome and data.draw(st.booleans()):
                state.give(promise, now)
        state.expire(now + KEPT_S + 1.0)

    def days() -> None:
        later = now + 2 * ENDED_S
        for session in state.sessions.values():
            session.beat_s = session.beat_s if session.end_reason else later
        state.expire(later)

    session_of = [f"s{n}" for n in range(2)]
    actions = {
        "session": lambda: [state.begin_session(s, now, Caller("key")) for s in session_of if s not in state.sessions],
        "create": lambda: state.create_model(session_of[number() % 2], number() % 2, CREATION),
        "train": lambda: state.train(
            f"{session_of[number() % 2]}:train:0", number(), data.draw(st.sampled_from(WORKS[1:7]))
        ),
        "sampler": lambda: state.create_sampler(session_of[number() % 2], 0, "base"),
        "sample": lambda: state.sample(
            state.sampler(f"{session_of[number() % 2]}:sample:0"), number() % 2 * COPY + number(), SAMPLE
        ),
        "ran": train,
        "sampled": sample,
        "fetched": fetch,
        "days": days,
        "tell": lambda: state.tell(state.session(session_of[number() % 2]), project_id=str(number())),
        "lost": lambda: [state.lose(pending) for pending in state.promises.values() if pending.outcome is None],
        "finish": lambda: state.finish(state.living(session_of[number() % 2]), now, "it is over"),
    }
    for action in data.draw(st.lists(st.sampled_from([*actions, "ran", "sampled", "train"]), max_size=40)):
        now += 1.0
        for session in state.sessions:
            state.sessions[session].beat_s = now + KEPT_S
        stored.fails = data.draw(st.integers(0, 9)) == 0 and action not in ("lost", "fetched", "days")
        with suppress(RequestRefused, DiskFull):
            actions[action]()
        stored.fails = False
        if any(
            state.running is pending
            for model in state.models.values()
            if model.failure
            for pending in model.waiting.values()
        ):
            continue  # a server that starts now has refused what the trainer still works on
        assert contents_of(stored.loaded(now)) == contents_of(state)


def test_what_the_trainer_worked_on_for_a_model_that_has_ended_is_refused_after_a_start(tmp_path: Path) -> None:
    stored = Kept(tmp_path)
    stored.state.begin_session("s", 0.0)
    stored.state.create_model("s", 0, CREATION)
    assert stored.state.next_training()
    stored.state.finish(stored.state.session("s"), 0.0, "it is over")
    again = stored.loaded(0.0)
    assert isinstance(again.promise("s:train:0/0").outcome, Failure)
    stored.state.trained(Success({}))
    assert stored.loaded(0.0).promise("s:train:0/0").outcome == Success({})
    stored.store.close()


def test_a_disk_without_room_refuses_a_request_and_a_smaller_one_is_accepted(tmp_path: Path) -> None:
    """All rows of a change are committed, or none."""
    stored = Kept(tmp_path)
    stored.state.begin_session("s", 0.0)
    assert stored.store._base
    stored.store._base.execute("PRAGMA max_page_count = 16")
    before = contents_of(stored.state)
    with pytest.raises(DiskFull):
        stored.state.create_model("s", 0, CREATION.model_copy(update={"user_metadata": {"a": "x" * 100_000}}))
    assert contents_of(stored.state) == before == contents_of(stored.loaded(0.0))
    stored.state.create_model("s", 0, CREATION)
    assert contents_of(stored.state) == contents_of(stored.loaded(0.0)) != before
    stored.store.close()
