"""The protocol's state in virtual time: posts in any order and repeated, several clients, sessions that end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.requests import RequestRefused
from service.tinker.bodies import LoadModelBody, Unusable
from service.tinker.owners import Caller
from service.tinker.promise_book import ENDED_S
from service.tinker.promises import Failure, GoneError, Promise, Success, UnknownId
from service.tinker.sample_scheduler import LoadWeights, StartSample
from service.tinker.state import GAP_S, HEIR_S, KEPT_S, PLACE_S, SESSION_S, UNASKED_S, ProtocolState

SUCCESS = Success({})
WORK = Unusable(error="some work")
FIRST = 10**18
"""The number of the first sample of an unpickled copy of a client's sampler."""


def new_state(*sessions: str, models: bool = True) -> ProtocolState:
    """Sessions with a model each, unless there are to be no `models`."""
    state = ProtocolState()
    for session in sessions:
        state.begin_session(session, 0.0)
        if models:
            state.create_model(session, 0, WORK)
    return state


def finish(state: ProtocolState, session_id: str, now: float) -> None:
    state.finish(state.session(session_id), now, "it is over")


def beat(state: ProtocolState, session_id: str, now: float) -> None:
    state.living(session_id).beat_s = now


def run_all(state: ProtocolState) -> list[str]:
    """Lets the trainer do all that can be done; returns the ids of the requests in that order."""
    ran = []
    while training := state.next_training():
        assert state.next_training() is None, "one thing at a time"
        ran.append(training[1].request_id)
        state.trained(SUCCESS)
    return ran


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_model_is_trained_in_the_order_of_its_numbers_and_once(data: st.DataObject) -> None:
    """Two clients post all their requests in any order, some of them twice, while the trainer works."""
    state, count = new_state("s", "t"), data.draw(st.integers(1, 6))
    settled: list[str] = []
    state.changed = lambda *names: settled.extend(names[:1])
    posts = [(session, seq) for session in "st" for seq in range(1, count + 1)]
    posts = data.draw(st.permutations(posts + data.draw(st.lists(st.sampled_from(posts), max_size=4))))
    promises: dict[tuple[str, int], Promise] = {}
    ran: list[str] = []
    for session, seq in posts:
        promise = state.train(f"{session}:train:0", seq, WORK)
        assert promises.setdefault((session, seq), promise) is promise, "a repeated post gets the same promise"
        if data.draw(st.booleans()) and state.next_training():
            assert state.running
            ran.append(state.running.request_id)
            state.trained(SUCCESS)
    ran += run_all(state)
    assert ran == [f"s:train:0/{seq}" for seq in range(count + 1)], "the second waits for the end of the first"
    finish(state, "s", 1.0)
    assert run_all(state) == [f"t:train:0/{seq}" for seq in range(count + 1)]
    assert all(promise.outcome == SUCCESS for promise in promises.values())
    assert set(settled) == {f"{s}:train:0/{n}" for s in "st" for n in range(count + 1)}


def test_who_waits_for_the_trainer_is_told_so() -> None:
    state = new_state("s", "t", "u", models=False)
    first, second, third = (state.create_model(name, 0, WORK) for name in "stu")
    run_all(state)
    assert state.queued(first) == ""
    assert state.queued(second).startswith("0 models are before")
    assert state.queued(third).startswith("1 models are before")
    assert "s:train:0" in state.queued(third)
    state.begin_session("v", 0.0, Caller("bob"))
    assert "s:train:0" not in state.queued(state.create_model("v", 0, WORK)), "it is another owner's"


@pytest.mark.parametrize("silent", [True, False])
def test_the_end_of_a_session_gives_the_trainer_to_the_next(silent: bool) -> None:
    state = new_state("s", "t")
    run_all(state)
    orphan = state.train("s:train:0", 2, WORK)
    beat(state, "t", SESSION_S)
    state.expire(SESSION_S)
    assert [model.session_id for model in state.holders] == ["s"]
    if silent:
        state.expire(SESSION_S + 1)
    else:
        finish(state, "s", SESSION_S + 1)
    assert isinstance(orphan.outcome, Failure)
    assert "its session has ended" in orphan.outcome.error
    assert run_all(state) == ["t:train:0/0"]
    with pytest.raises(GoneError, match="has ended"):
        beat(state, "s", SESSION_S + 2)
    assert isinstance(state.train("s:train:0", 1, WORK).outcome, Failure)


@pytest.mark.parametrize(
    ("path", "owner", "gives_up"),
    [
        ("tinker://s:train:0/weights/x", "alice", True),
        ("tinker://s:train:0/weights/x", "bob", False),
        ("tinker://s:train:01/weights/x", "alice", False),
        ("", "alice", False),
    ],
)
def test_a_silent_client_gives_its_place_to_itself_started_again(path: str, owner: str, gives_up: bool) -> None:
    """That is what begins with a state of its model, with a key of the same owner."""
    state = ProtocolState()
    state.begin_session("s", 0.0, Caller("alice"))
    state.begin_session("t", 0.0, Caller(owner))
    state.create_model("s", 0, WORK)
    work = LoadModelBody(session_id="t", model_seq_id=0, path=path, optimizer=False)
    state.create_model("t", 0, work)
    run_all(state)
    last = state.train("s:train:0", 1, WORK)  # after which it has done something, so that only its heir takes its place
    state.heard(last, 10.0)
    assert run_all(state) == ["s:train:0/1"]
    beat(state, "t", SESSION_S)
    state.expire(10.0 + HEIR_S)
    assert run_all(state) == []
    state.expire(10.0 + HEIR_S + 1)
    assert run_all(state) == (["t:train:0/0"] if gives_up else [])
    refused = state.train("s:train:0", 2, WORK).outcome
    assert ("t:train:0 takes its place" in getattr(refused, "error", "")) == gives_up
    beat(state, "s", 60.0)  # its session is there: it may have another model, and samplers


def test_a_silent_client_whose_model_has_done_nothing_gives_its_place_to_the_same_owner() -> None:
    """It was started again after it had failed at its beginning. It keeps its place, and takes no second one."""
    state = ProtocolState(places=2)
    for session, owner in (("s", "alice"), ("t", "alice"), ("u", "bob"), ("v", "alice")):
        state.begin_session(session, 0.0, Caller(owner))
        state.create_model(session, 0, WORK)
    run_all(state)
    for session in "uv":
        beat(state, session, HEIR_S)
    for late_s in (0, 1, 2):
        state.expire(HEIR_S + late_s)
        assert run_all(state) == (["v:train:0/0"] if late_s == 1 else [])
    failure = state.models["s:train:0"].failure
    assert failure
    assert "v:train:0 takes its place" in failure.error
    state.train("v:train:0", 1, WORK)
    assert run_all(state) == ["v:train:0/1"]
    state.begin_session("w", 2 * HEIR_S, Caller("alice"))
    state.create_model("w", 0, WORK)
    beat(state, "t", HEIR_S + 3)
    beat(state, "u", 2 * HEIR_S)
    state.expire(2 * HEIR_S + 2)
    assert run_all(state) == [], "one has done something, the other one's client is there"
    finish(state, "t", 2 * HEIR_S + 2)
    assert run_all(state) == ["u:train:0/0"]


def test_what_is_asked_of_a_sampler_is_no_sign_of_its_models_client() -> None:
    """A process that was given the sampler may ask on when the client is dead."""
    state = new_state("s")
    sampler = state.create_sampler("s", 0, "base")
    state.heard(state.sample(sampler, 0, WORK), SESSION_S)
    state.expire(SESSION_S + 1)
    assert state.sessions["s"].ended_s is not None


def test_what_the_trainer_works_on_is_finished_though_its_session_ends() -> None:
    state = new_state("s", "t")
    training = state.next_training()
    assert training
    finish(state, "s", 0.0)
    assert state.next_training() is None
    state.trained(SUCCESS)
    assert training[1].outcome == SUCCESS
    assert run_all(state) == ["t:train:0/0"]


def test_a_client_never_waits_for_itself() -> None:
    """A second model of a session takes the trainer over once the first has nothing to do."""
    state = new_state("s", "t")
    state.create_model("s", 1, WORK)
    state.train("s:train:0", 1, WORK)
    assert run_all(state) == ["s:train:0/0", "s:train:0/1", "s:train:1/0"]
    refused = state.train("s:train:0", 2, WORK).outcome
    assert isinstance(refused, Failure)
    assert "s:train:1 of the same session" in refused.error


@pytest.mark.parametrize("frees", [False, True])
def test_an_adapter_ends_for_no_other_and_one_beyond_the_places_is_refused(frees: bool) -> None:
    """It waits as that of another client does, and is refused with a list when no place becomes free."""
    state = ProtocolState(adapters=True, places=3)
    for session in ("s", "t"):
        state.begin_session(session, 0.0)
    for session, number in (("s", 0), ("s", 1), ("t", 0), ("s", 2)):
        state.create_model(session, number, WORK)
    assert run_all(state) == ["s:train:0/0", "s:train:1/0", "t:train:0/0"]
    for now in (10.0, 10.0 + PLACE_S):
        for session in ("s", "t"):
            beat(state, session, now)
        state.expire(now)
    assert run_all(state) == []
    assert [model.model_id for model in state.holders] == ["s:train:0", "s:train:1", "t:train:0"]
    if frees:
        finish(state, "t", 75.0)
        assert run_all(state) == ["s:train:2/0"]
        return
    state.expire(75.0)
    refused = state.promise("s:train:2/0").outcome
    assert isinstance(refused, Failure)
    assert "3 adapters are trained at the same time (service.models)" in refused.error
    assert "has 2 of them: s:train:0, s:train:1." in refused.error
    assert [model.failure for model in state.holders] == [None] * 3


def test_a_model_whose_batch_is_on_its_way_is_not_taken_over() -> None:
    """The first part of a batch, which comes last, is not there yet."""
    state = new_state("s")
    run_all(state)
    second = state.train("s:train:0", 2, WORK)
    state.create_model("s", 1, WORK)
    assert run_all(state) == []
    state.train("s:train:0", 1, WORK)
    assert run_all(state) == ["s:train:0/1", "s:train:0/2", "s:train:1/0"]
    assert second.outcome == SUCCESS


def test_requests_do_not_wait_for_ever_for_one_that_does_not_come() -> None:
    state = new_state("s", "t")
    run_all(state)

    def pass_time(now: float) -> None:
        beat(state, "s", now)
        beat(state, "t", now)
        state.expire(now)

    late = state.train("s:train:0", 2, WORK)
    pass_time(100.0)
    state.train("s:train:0", 1, WORK)
    assert run_all(state) == ["s:train:0/1", "s:train:0/2"]
    assert late.outcome == SUCCESS
    stuck = state.train("s:train:0", 4, WORK)
    for now in (200.0, 200.0 + GAP_S):
        pass_time(now)
        assert stuck.outcome is None
    pass_time(201.0 + GAP_S)
    assert isinstance(stuck.outcome, Failure)
    assert "its request 3 did not come" in stuck.outcome.error
    assert isinstance(state.train("s:train:0", 3, WORK).outcome, Failure)
    assert run_all(state) == ["t:train:0/0"]


def test_an_ended_session_is_forgotten_a_day_after_it_or_anything_of_it_was_used() -> None:
    """Other processes use its samplers for longer than it lives."""
    state = new_state("s", "t", models=False)
    state.create_model("s", 0, WORK)
    sampler = state.create_sampler("s", 0, "base")
    run_all(state)
    sample = state.sample(sampler, 0, WORK)
    finish(state, "s", 0.0)
    removed: list[object] = []
    state.write = removed.extend

    def passes(now: float, uses: bool = False) -> None:
        for _ in range(2):  # what is used is noted by the first, and what has no promises any more goes by the second
            beat(state, "t", now)
            state.expire(now)
        if uses:
            assert state.sampler(sampler.sampler_id) is sampler

    passes(2 * ENDED_S)
    assert state.promise(sample.request_id) is sample, "it is not done yet"
    state.settle(sample, SUCCESS)
    for days in range(3, 6):
        passes(days * ENDED_S, uses=True)
    passes(6 * ENDED_S)
    assert "s" in state.sessions
    passes(7 * ENDED_S + 1)
    assert removed[-3:] == ["s", "s:train:0", "s:sample:0"]
    assert (list(state.sessions), list(state.models), list(state.samplers)) == (["t"], [], [])
    for name in ("s:train:0/0", sample.request_id):
        with pytest.raises(UnknownId):
            state.promise(name)
    with pytest.raises(UnknownId, match="unused for 24 h"):
        state.create_model("s", 0, WORK)


def test_a_model_that_could_not_be_created_gives_the_trainer_back() -> None:
    state = new_state("s", "t")
    assert state.next_training()
    state.trained(Failure("no such base", "user"))
    assert run_all(state) == ["t:train:0/0"]
    refused = state.train("s:train:0", 1, WORK).outcome
    assert isinstance(refused, Failure)
    assert "no such base" in refused.error


def test_a_long_session_keeps_no_promises_that_were_fetched() -> None:
    """Also where one in between is never asked for: that one is forgotten too, after an hour."""
    state, now = new_state("s"), 0.0
    begun = state.create_sampler("s", 0, "base")
    sampler = begun.sampler_id
    for number in range(1, 200):
        now += 60.0
        beat(state, "s", now)
        promise = state.train("s:train:0", number, WORK)
        run_all(state)
        sampled = state.sample(begun, FIRST + number - 1, WORK)
        while not isinstance(state.turns.next(), StartSample):
            pass
        state.sampled(sampled, SUCCESS)
        state.expire(now)
        if number % 10:
            state.give(promise, now)
            state.give(sampled, now)
    assert len(state.promises) < 2 * (KEPT_S + UNASKED_S) / 60.0
    assert state.samplers[sampler].retired[0][1] > FIRST + 100
    assert len(state.samplers[sampler].retired) < UNASKED_S / 60.0
    for again in (state.train("s:train:0", 5, WORK), state.sample(begun, FIRST + 5, WORK)):
        assert again.forgotten
    assert state.next_training() is None
    assert state.turns.next() is None
    with pytest.raises(GoneError):
        state.promise(f"{sampler}/{FIRST + 5}")


def test_unknown_ids_are_refused() -> None:
    state = new_state("s")
    for call in (
        lambda: state.session("x"),
        lambda: state.model("x"),
        lambda: state.sampler("x"),
        lambda: state.promise("x"),
    ):
        with pytest.raises(UnknownId, match="'x'"):
            call()
    with pytest.raises(RequestRefused, match="seq_id = 0"):
        state.train("s:train:0", 0, WORK)


def test_a_repeated_post_of_a_model_or_a_sample_changes_nothing() -> None:
    state = new_state("s", models=False)
    assert state.create_model("s", 0, WORK) is state.create_model("s", 0, WORK)
    begun = state.create_sampler("s", 0, "base")
    assert state.create_sampler("s", 0, "other").target == "base"
    assert state.sample(begun, FIRST, WORK) is state.sample(begun, FIRST, WORK)
    assert state.turns.next() == LoadWeights("base")
    assert isinstance(state.turns.next(), StartSample)
    assert state.turns.next() is None
