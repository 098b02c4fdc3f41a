"""The state that is made again from its records is the state, whatever happened, and wherever a journal was begun."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_posts import passing

from service.tinker.adapters import AdapterWish
from service.tinker.asked import Creation, Loading, Saving, Unusable, Update, Work
from service.tinker.codec import ForwardBackwardCall
from service.tinker.history import ModelHistory
from service.tinker.promises import ClientSampler, Failure, GoneError, Outcome, Promise, SampleWork, Success, UnknownId
from service.tinker.records import Record, SampleAsked, TrainingAsked, decode, encode
from service.tinker.replaying import records_of, replay
from service.tinker.state import CLONE, KEPT_S, ProtocolState
from service.tinker.turns import StartSample
from trireme.core.datum import ModelInput
from trireme.core.types import AdamParams, SamplingParams

FAILED = Failure("no", "user")
PASS = ForwardBackwardCall.of(passing("s:train:0", 1))
UPDATE = Update(AdamParams(max_grad_norm=inf))
CREATION = Creation("m", {"a": 1}, "adamw", wish=AdapterWish(4, seed=3))
SNAPSHOT = Saving("snapshot", None, None, False, None, 3)
STATE = Saving("state", "x", 5, True, {"a": "b"})
SAMPLE = SampleWork(ModelInput([1, 2]), 2, SamplingParams(max_tokens=3, stop=[4, "x"], seed=7), True, 5)
WORKS: list[Work] = [CREATION, Loading("tinker://p", True), PASS, UPDATE, SNAPSHOT, STATE, Unusable("why")]


@pytest.mark.parametrize("work", [*WORKS, None], ids=lambda work: type(work).__name__)
def test_work_is_read_as_it_was_written(work: Any) -> None:
    found = decode(encode(TrainingAsked("s:train:0", 4, work)))
    assert isinstance(found, TrainingAsked)
    if isinstance(work, ForwardBackwardCall):
        assert isinstance(found.work, ForwardBackwardCall)
        assert found.work.encoded == work.encoded
    else:
        assert found.work == work


def test_a_sample_is_read_as_it_was_written() -> None:
    found = decode(encode(SampleAsked("s:sample:0", 4, SAMPLE)))
    assert isinstance(found, SampleAsked)
    assert found.work
    np.testing.assert_array_equal(found.work.prompt.tokens, [1, 2])
    assert (found.work.params, found.work.num_samples, found.work.topk) == (SAMPLE.params, 2, 5)


def test_what_is_done_again_is_what_made_the_weights() -> None:
    """Passes whose gradients were dropped are not, nor what only looked."""
    history, done = ModelHistory(), Success({})
    forward = ForwardBackwardCall("m", 1, True, "cross_entropy", {}, None)
    outcomes: list[tuple[Work, Outcome]] = [
        (CREATION, done),
        (PASS, done),
        (forward, done),
        (STATE, done),
        (PASS, FAILED),
        (UPDATE, FAILED),
        (PASS, done),
        (UPDATE, done),
        (SNAPSHOT, done),
        (SNAPSHOT, FAILED),
        (PASS, done),
        (PASS, FAILED),
    ]
    for seq, (work, outcome) in enumerate(outcomes):
        history.note(seq, work, outcome, float(seq))
    assert [(step.seq, step.error) for step in history.kept()] == [
        (0, ""),
        (6, ""),
        (7, ""),
        (8, ""),
        (10, ""),
        (11, "no"),
    ]
    assert not history.is_due(100.0, 1.0), "gradients are held"
    history.note(12, UPDATE, FAILED, 12.0)
    assert not history.is_due(50.0, 60.0)
    assert not history.is_due(60.0, 60.0), "a commit would let go of the snapshot, which may be sampled from now"
    history.note(13, UPDATE, done, 13.0)
    assert not history.is_due(50.0, 60.0)
    assert history.is_due(60.0, 60.0)
    history.committed("place")
    assert list(history.kept()) == []
    assert not history.is_due(1000.0, 1.0), "nothing was done since"
    history.note(14, Loading("tinker://p", False), done, 14.0)
    assert history.is_due(14.0, 60.0), "its client may delete that state"


class Recorded:
    """A state whose records are kept, some of which are now and then replaced by those that say the same."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.state = ProtocolState()
        self.histories = replay(self.state, [], 0.0)
        self.state.write = self.records.append

    def begin_again(self) -> None:
        self.records = list(records_of(self.state, self.histories))
        self.state.write = self.records.append

    def replayed(self, now: float) -> tuple[ProtocolState, Any]:
        state = ProtocolState()
        return state, replay(state, [decode(encode(record)) for record in self.records], now)


def clones_of(sampler: ClientSampler) -> dict[int, tuple[Any, ...]]:
    return {number: (each.retired, each.dropped, each.completed) for number, each in sampler.clones.items()}


def seen(state: ProtocolState, histories: Any) -> dict[str, Any]:
    """All that clients, and who does the work, can see of a state."""
    return {
        "sessions": {
            s.session_id: (s.owner, s.ended_s is None, s.models, s.samplers, s.metadata)
            for s in state.sessions.values()
        },
        "models": {m.model_id: (m.next_seq, m.ended, m.retired, sorted(m.waiting)) for m in state.models.values()},
        "samplers": {s.sampler_id: (s.target, s.joined, clones_of(s)) for s in state.samplers.values()},
        "promises": {p.request_id: (p.session_id, p.outcome) for p in state.promises()},
        "losses": dict(state.losses),
        "steps": {
            m.model_id: [(step.seq, step.error) for step in histories[m.model_id].kept()]
            for m in state.models.values()
            if not m.ended
        },
    }


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_state_is_made_again_from_its_records(data: st.DataObject) -> None:
    recorded, now = Recorded(), 0.0
    state, histories = recorded.state, recorded.histories
    running: list[Promise] = []

    def number() -> int:
        return data.draw(st.integers(0, 5))

    def train() -> None:
        if found := state.next_training():
            model, promise = found
            work: Any = promise.work
            outcome = data.draw(st.sampled_from([Success({"a": [1]}), Success(b"x"), FAILED]))
            state.trained(outcome)
            histories[model.model_id].note(promise.number, work, outcome, now)
            if data.draw(st.booleans()) and histories[model.model_id].is_due(now + 1e6, 1.0):
                histories[model.model_id].committed(f"place-{model.next_seq}")
                recorded.begin_again()

    def sample() -> None:
        while step := state.turns.next():
            if isinstance(step, StartSample):
                running.append(step.item)
        if running and data.draw(st.booleans()):
            state.sampled(running.pop(0), Success(b"sampled"))

    def fetch() -> None:
        for promise in state.promises():
            if promise.outcome and data.draw(st.booleans()):
                state.give(promise, now)
        state.expire(now + KEPT_S + 1.0)

    session_of = [f"s{n}" for n in range(2)]
    actions = {
        "session": lambda: [state.begin_session(s, now, "key") for s in session_of if s not in state.sessions],
        "create": lambda: state.create_model(session_of[number() % 2], number() % 2, CREATION),
        "train": lambda: state.train(
            f"{session_of[number() % 2]}:train:0", number(), data.draw(st.sampled_from(WORKS[2:]))
        ),
        "sampler": lambda: state.create_sampler(session_of[number() % 2], 0, "base"),
        "join": lambda: state.join(f"{session_of[number() % 2]}:sample:0"),
        "sample": lambda: state.sample(f"{session_of[number() % 2]}:sample:0", number() % 2 * CLONE + number(), SAMPLE),
        "ran": train,
        "sampled": sample,
        "fetched": fetch,
        "tell": lambda: state.tell(session_of[number() % 2], {"project_id": str(number())}),
        "lost": lambda: [state.lose(each) for each in state.promises() if each.outcome is None],
        "finish": lambda: state.finish(session_of[number() % 2], now),
        "again": recorded.begin_again,
    }
    for action in data.draw(st.lists(st.sampled_from([*actions, "ran", "sampled", "train"]), max_size=40)):
        now += 1.0
        for session in state.sessions:
            if state.sessions[session].ended_s is None:
                state.beat(session, now + KEPT_S)
        try:
            actions[action]()
        except (UnknownId, GoneError, Exception) as error:
            if not isinstance(error, UnknownId | GoneError) and "seq_id = 0" not in str(error):
                raise
    before, raw = seen(state, histories), seen(*recorded.replayed(now))
    assert [raw[name] for name in ("sessions", "steps")] == [before[name] for name in ("sessions", "steps")]
    assert {name: each[:2] for name, each in raw["models"].items()} == {
        name: each[:2] for name, each in before["models"].items()
    }
    assert raw["losses"] == before["losses"]
    assert raw["promises"].items() >= before["promises"].items(), "those that were given may be kept for longer"
    recorded.begin_again()
    assert seen(*recorded.replayed(now)) == before
