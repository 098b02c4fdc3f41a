"""What replicas report of their engines is added up, each second and each token once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.core.engine_use import ChatShares, EngineUse, UseMeter


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 9), st.integers(0, 9), st.booleans())))
def test_engines_that_are_replaced_lose_nothing(works: list[tuple[int, float, int, bool]]) -> None:
    """Three replicas work for chats; before some of it, their engine is replaced, and counts from 0 again."""
    meter, said = UseMeter(), {replica: EngineUse() for replica in range(3)}
    done = EngineUse()
    meter.look({replica: {"chat": use} for replica, use in said.items()}, 0.0)
    for replica, seconds, tokens, replaced in works:
        if replaced and tokens:
            # A new engine is known by its smaller counts.
            said[replica] = EngineUse(0.0, 0)
            meter.look({replica: {"chat": said[replica]}}, 0.0)
        said[replica] += EngineUse(seconds, tokens)
        done += EngineUse(seconds, tokens)
        meter.look({replica: {"chat": said[replica]}}, 0.0)
    assert meter.total["chat"].tokens == done.tokens
    assert meter.total["chat"].seconds == pytest.approx(done.seconds)
    assert meter.total["run"] == EngineUse()


def test_what_a_new_engine_did_before_its_first_report_counts() -> None:
    meter = UseMeter()
    meter.look({0: {"chat": EngineUse(5.0, 50)}}, 0.0)
    meter.look({0: {"chat": EngineUse(2.0, 20)}}, 10.0)
    assert meter.total["chat"] == EngineUse(2.0, 20)


def test_shares_are_those_of_the_seconds_that_passed_for_all_engines() -> None:
    meter = UseMeter()
    assert meter.take() == ChatShares(0.0, 0.0)
    nothing = {"run": EngineUse(), "chat": EngineUse()}
    meter.look({0: nothing, 1: nothing, 2: None}, 100.0)
    meter.look({0: {"run": EngineUse(3.0, 30), "chat": EngineUse(1.0, 10)}, 1: nothing, 2: None}, 110.0)
    shares = meter.take()
    assert (shares.seconds, shares.tokens) == (pytest.approx(1 / 20), pytest.approx(10 / 40))
    assert meter.take() == shares, "where nothing was reported since"
    meter.look({0: {"run": EngineUse(4.0, 40), "chat": EngineUse(1.0, 10)}}, 120.0)
    assert meter.take() == ChatShares(0.0, 0.0)
