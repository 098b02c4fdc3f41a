"""What an owner may use, in virtual time: buckets that are filled evenly, and may owe something."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.quotas import Quota, Quotas, QuotaUsed


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def quotas(**most: int) -> tuple[Quotas, Clock]:
    clock = Clock()
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
