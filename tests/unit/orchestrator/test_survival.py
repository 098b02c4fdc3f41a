"""How long rollouts last, from those that ended and those that were stopped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.survival import KEPT, Survival

SEEN = st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=40)


def of(*seen: tuple[float, bool]) -> Survival:
    survival = Survival()
    for value, ended in seen:
        survival.note(value, ended=ended)
    return survival


def test_an_example_worked_out_by_hand() -> None:
    """Of four one ends at 1; of the two that are left at 3 one ends there."""
    survival = of((3, False), (1, True), (3, True), (2, False))
    assert survival.beyond([0, 1, 2, 2.9, 3, 9]).tolist() == [1, 0.75, 0.75, 0.75, 0.375, 0.375]
    assert survival.mean() == 1 + 2 * 0.75


def test_before_the_first_all_last_longer() -> None:
    assert Survival().beyond([0, 5]).tolist() == [1, 1]
    assert Survival().mean() == 0


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_if_none_was_stopped_it_is_what_was_seen(values: list[int]) -> None:
    survival = of(*((value, True) for value in values))
    assert survival.mean() == pytest.approx(np.mean(values))
    for value in range(22):
        assert survival.beyond(value) == pytest.approx(np.mean(np.array(values) > value))


@given(SEEN)
def test_shares_fall_and_stopping_makes_them_larger(seen: list[tuple[int, bool]]) -> None:
    shares = of(*seen).beyond(range(22))
    assert (np.diff(shares) <= 0).all()
    assert (shares >= 0).all()
    assert (shares + 1e-9 >= of(*((value, True) for value, _ in seen)).beyond(range(22))).all()


def test_the_mean_is_that_of_all_though_the_long_ones_are_stopped() -> None:
    draws = np.random.default_rng(0)
    lengths, stops = draws.geometric(1 / 100, KEPT), draws.geometric(1 / 150, KEPT)
    pairs = zip(lengths, stops, strict=True)
    survival = of(*((float(min(length, stop)), bool(length <= stop)) for length, stop in pairs))
    assert np.mean(lengths[lengths <= stops]) < 70, "those that ended are short"
    assert survival.mean() == pytest.approx(np.mean(lengths), rel=0.1)


def test_old_rollouts_are_forgotten() -> None:
    survival = of(*[(1, True)] * KEPT, *[(5, True)] * KEPT)
    assert survival.mean() == 5
