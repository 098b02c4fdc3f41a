"""Weights that are sent to sessions, in whole runs: whoever joins, dies, hangs or is slow, an epoch begins exactly when
the members are others, no replica receives beside weights that it has still to load (it would say so), and nothing
waits that did not wait without sessions."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Outcome, Scenario, simulate
from test_joins_in_virtual_time import steps_of
from test_pipeline_in_virtual_time import check

SENT = Scenario("drop", 2, steps=20, spread=0.5, sessions=True)
ALL = (0, 1, 2, 3)


def members(outcome: Outcome) -> list[tuple[int, ...]]:
    """Returns the numbers of the members of each session."""
    return [session.members for session, _ in outcome.trainer.sessions]


def check_sessions(outcome: Outcome) -> Outcome:
    check(outcome)
    for (before, who_before), (after, who_after) in pairwise(outcome.trainer.sessions):
        begins = [id(session) for session in who_before] != [id(session) for session in who_after]
        assert after.epoch - before.epoch >= begins
        assert after.epoch == before.epoch or begins, "groups that could be used again are made anew"
    return outcome


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("update_s", [0.5, 5.0, 20.0])
def test_a_run_takes_as_long_as_without_sessions(update_s: float, bound: int) -> None:
    sent = replace(SENT, update_s=update_s, max_steps_off_policy=bound)
    outcome, plain = check_sessions(simulate(sent)), simulate(replace(sent, sessions=False))
    assert outcome.ended_s == pytest.approx(plain.ended_s)
    fetches = sum(replica.fetches for replica in outcome.replicas)
    received = sum(map(len, members(outcome)))
    assert fetches + received == len(ALL) * (sent.steps + 1)
    if bound == 0 or update_s < sent.train_s:
        assert fetches == 0, "all have taken the version before"


@pytest.mark.parametrize("fetch_s", [12.0, 20.0])
def test_a_joiner_that_fetches_for_longer_than_a_step_is_in_a_session_in_the_end(fetch_s: float) -> None:
    """Else it would have to fetch each version, and each update would last as long as that."""
    outcome = check_sessions(simulate(replace(SENT, steps=40, joins_at_s={4: 30.0}, fetch_s=fetch_s)))
    assert members(outcome)[-1] == (*ALL, 4)
    assert outcome.replicas[4].tokens > 0
    assert steps_of(outcome)[-2] == pytest.approx(steps_of(outcome)[0]), "the last one waits for its update"


def test_a_joiner_that_fetches_for_much_longer_than_versions_are_kept_serves_nevertheless() -> None:
    outcome = check_sessions(simulate(replace(SENT, steps=40, joins_at_s={4: 30.0}, fetch_s=100.0)))
    assert outcome.replicas[4].tokens > 0
    assert len(outcome.replicas) == 5, "nobody was replaced"


times = st.floats(0.0, 150.0)
losses = st.dictionaries(st.integers(0, 3), times, max_size=3)


@settings(deadline=None, max_examples=40)
@given(
    dies=losses,
    options=st.fixed_dictionaries(
        {
            "hangs_at_s": losses,
            "hangs_at_offers_from_s": losses,
            "drains_at_s": st.dictionaries(st.integers(0, 3), times, max_size=1),
            "joins_at_s": st.dictionaries(st.integers(4, 6), times, max_size=3),
            "update_s": st.sampled_from([0.5, 4.0, 12.0]),
            "fetch_s": st.sampled_from([0.0, 3.0, 20.0]),
            "max_steps_off_policy": st.integers(0, 2),
            "restart_s": st.sampled_from([1.0, 25.0]),
        }
    ),
)
def test_whoever_comes_and_goes(dies: dict[int, float], options: dict[str, Any]) -> None:
    hangs = {index: at for index, at in options["hangs_at_s"].items() if index not in dies}
    drains = {index: at for index, at in options["drains_at_s"].items() if index not in {*dies, *hangs}}
    options |= {"dies_at_s": dies, "hangs_at_s": hangs, "drains_at_s": drains}
    check_sessions(simulate(replace(SENT, steps=12, patience_s=1000.0, offer_s=100.0, **options)))
