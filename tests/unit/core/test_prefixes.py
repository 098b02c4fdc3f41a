"""Shared prefixes are those of the tokens: each distinct prefix is in a forest once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.core import prefixes
from trireme.core.prefixes import FEWEST_SHARED, Forest

datums = st.lists(st.lists(st.integers(-1, 2), max_size=9).map(lambda t: np.array(t, np.int32)), min_size=1, max_size=9)


@pytest.fixture(autouse=True)
def every_shared_token_counts(monkeypatch):
    monkeypatch.setattr(prefixes, "FEWEST_SHARED", 1)


@given(datums)
def test_each_distinct_prefix_is_computed_once(tokens_D):
    forest = Forest.find(tokens_D)
    assert forest.lengths.tolist() == [len(tokens) for tokens in tokens_D]
    assert sorted(forest.order.tolist()) == list(range(len(tokens_D)))
    assert forest.shared[0] == 0
    for before, d, shared in zip(forest.order, forest.order[1:], forest.shared[1:], strict=False):
        assert tokens_D[before][:shared].tolist() == tokens_D[d][:shared].tolist()
    distinct = {tuple(tokens[: n + 1].tolist()) for tokens in tokens_D for n in range(len(tokens))}
    assert forest.lengths.sum() - forest.shared.sum() == len(distinct)


@given(st.lists(datums, min_size=1, max_size=4))
def test_groups_are_apart(tokens_N):
    forest = Forest.find_in_groups(tokens_N)
    first = 0
    for tokens_D in tokens_N:
        group = slice(first, first + len(tokens_D))
        alone = Forest.find(tokens_D)
        assert forest.lengths[group].tolist() == alone.lengths.tolist()
        assert (forest.order[group] - first).tolist() == alone.order.tolist()
        assert forest.shared[group].tolist() == alone.shared.tolist()
        first += len(tokens_D)
    assert len(forest) == first


def test_few_common_tokens_make_no_tree(monkeypatch):
    monkeypatch.undo()
    for common in (FEWEST_SHARED - 1, FEWEST_SHARED):
        forest = Forest.find([np.array([0] * common + [end], np.int32) for end in (2, 1)])
        assert forest.order.tolist() == [1, 0]
        assert forest.shared.tolist() == [0, common if common == FEWEST_SHARED else 0]


def test_a_flat_forest_shares_nothing():
    forest = Forest.flat(np.array([3, 1]))
    assert (forest.lengths.tolist(), forest.order.tolist(), forest.shared.tolist()) == ([3, 1], [0, 1], [0, 0])
