"""What an owner may use, in virtual time: buckets that are filled evenly, and may owe something."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manual_clock import ManualClock

from service.quotas import Quota, Quotas, QuotaUsed, TokensTaken


def quotas(**most: int) -> tuple[Quotas, ManualClock]:
    clock = ManualClock()
    return Quotas({"a": Quota(**most)}, clock), clock


def test_a_quota_that_is_used_up_says_when_there_is_something_again() -> None:
    found, clock = quotas(trained_per_minute=600)
    found.check_tokens("a", "trained")
    found.take("a", "trained", 1200)  # the whole of a batch, though it is more than a minute's
    with pytest.raises(QuotaUsed, match="trained_per_minute=600 tokens; there will be some in 60 s") as refused:
        found.check_tokens("a", "trained")
    clock.now += refused.value.wait_s - 1
    with pytest.raises(QuotaUsed):
        found.check_tokens("a", "trained")
    clock.now += 1.001
    found.check_tokens("a", "trained")
    found.check_tokens("a", "sampled")
    found.check_tokens("b", "trained")


def test_the_longest_wait_is_told() -> None:
    found, _ = quotas(sampled_per_minute=60, sampled_per_day=86400)
    found.take("a", "sampled", 86460)
    with pytest.raises(QuotaUsed, match="sampled_per_minute=60 tokens") as refused:
        found.check_tokens("a", "sampled")
    assert refused.value.wait_s == pytest.approx(86401)
    found, _ = quotas(sampled_per_minute=6000, sampled_per_day=6000)
    found.take("a", "sampled", 6010)
    with pytest.raises(QuotaUsed, match="sampled_per_day"):
        found.check_tokens("a", "sampled")


def test_counts_are_compared_with_what_is_there() -> None:
    found, _ = quotas(models=2)
    found.check_count("a", "models", 1, 5.0)
    with pytest.raises(QuotaUsed, match="the quota of a is used up: models=2, and there are 2") as refused:
        found.check_count("a", "models", 2, 5.0)
    assert refused.value.wait_s == 5.0
    found.check_count("a", "samples", 10_000, 1.0)
    found.check_count("b", "models", 10_000, 5.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 500)), min_size=1, max_size=60))
def test_over_any_time_no_more_is_admitted_than_the_quota_and_one_request(asked: list[tuple[float, int]]) -> None:
    found, clock = quotas(sampled_per_minute=600)
    taken, largest, began = 0, 0, clock.now
    for seconds, tokens in asked:
        clock.now += seconds
        try:
            found.check_tokens("a", "sampled")
        except QuotaUsed:
            continue
        found.take("a", "sampled", tokens)
        taken, largest = taken + tokens, max(largest, tokens)
    assert taken <= 600 + (clock.now - began) * 10 + largest


MOST = Quota(trained_per_minute=600, trained_per_day=9000, sampled_per_day=500)


def waits(found: Quotas) -> list[float]:
    """How long an owner has to wait for each kind of tokens."""
    waited = []
    for what in ("trained", "sampled"):
        try:
            found.check_tokens("a", what)
            waited.append(0.0)
        except QuotaUsed as used:
            waited.append(used.wait_s)
    return waited


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 90), st.sampled_from(["trained", "sampled"]), st.integers(1, 800), st.booleans()))
)
def test_a_server_that_is_started_again_knows_what_was_taken(asked: list[tuple[float, str, int, bool]]) -> None:
    """From the notes of all that was taken, or of what was missing when some of them were replaced. Its own clock
    begins anew."""
    clock, today, notes = ManualClock(), ManualClock(1e9), list[TokensTaken]()
    first = Quotas({"a": MOST}, clock, today)
    for seconds, what, tokens, replaced in asked:
        clock.now, today.now = clock.now + seconds, today.now + seconds
        if noted := first.note("a", what, tokens):
            notes.append(noted)
        first.take("a", what, tokens)
        if replaced:
            notes = list(first.missing())
            assert len(notes) <= 3
    clock.now, today.now = clock.now + 30, today.now + 30
    second = Quotas({"a": MOST}, ManualClock(1.0), today)
    for note in notes:
        second.again(note)
    assert waits(second) == pytest.approx(waits(first), abs=1e-3)


def test_what_no_quota_counts_is_not_noted() -> None:
    found, _ = quotas(trained_per_day=10)
    assert found.note("a", "sampled", 5) is None
    assert found.note("b", "trained", 5) is None
    assert found.note("a", "trained", 0) is None
    assert list(found.missing()) == []


def test_notes_of_other_quotas_and_clocks_that_went_back() -> None:
    """A quota that was changed meanwhile has its new size, and still lacks what was taken."""
    today = ManualClock(1e9)
    found = Quotas({"a": Quota(trained_per_day=86400)}, ManualClock(), today)
    for name, tokens in (("trained_per_minute", 10), ("trained_per_day", 86500), ("sampled_per_day", 1)):
        found.again(TokensTaken("a", name, tokens, today.now + 5000))
    found.again(TokensTaken("b", "trained", 10**9, today.now))
    with pytest.raises(QuotaUsed) as refused:
        found.check_tokens("a", "trained")
    assert refused.value.wait_s == pytest.approx(101)
