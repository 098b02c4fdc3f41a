"""Deadlines follow what the run has shown, within their bounds."""

import math

from hypothesis import given
from hypothesis import strategies as st

from trireme.core.deadline import LEAST_S, TAUGHT_BY, TIMES_SLOWEST, LearnedDeadline

seconds = st.floats(0.0, 1e6, allow_nan=False)
configured = st.floats(0.1, 1e6) | st.just(math.inf)


def taught(configured_s: float, durations: list[float]) -> LearnedDeadline:
    deadline = LearnedDeadline(configured_s)
    for took_s in durations:
        deadline.note(took_s)
    return deadline


@given(configured, st.lists(seconds, max_size=TAUGHT_BY - 1))
def test_the_configured_one_holds_until_enough_have_been_seen(configured_s: float, durations: list[float]) -> None:
    assert taught(configured_s, durations).seconds == configured_s


@given(configured, st.lists(seconds, min_size=TAUGHT_BY, max_size=40))
def test_it_is_ten_times_the_slowest_within_its_bounds(configured_s: float, durations: list[float]) -> None:
    limit_s = taught(configured_s, durations).seconds
    assert limit_s <= configured_s
    assert limit_s == configured_s or limit_s >= LEAST_S
    assert limit_s == configured_s or limit_s >= TIMES_SLOWEST * max(durations)
    if LEAST_S <= TIMES_SLOWEST * max(durations) <= configured_s:
        assert limit_s == TIMES_SLOWEST * max(durations)


@given(configured, st.lists(seconds, min_size=TAUGHT_BY, max_size=40), seconds)
def test_it_never_shrinks_once_it_is_learned(configured_s: float, durations: list[float], another: float) -> None:
    deadline = taught(configured_s, durations)
    before = deadline.seconds
    deadline.note(another)
    assert deadline.seconds >= before
