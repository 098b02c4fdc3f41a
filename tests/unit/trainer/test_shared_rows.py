"""A row of distinct tokens has each prefix once, and each datum finds its tokens in it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.shared_rows import HeadRows, SharedRow
from trireme.core.prefixes import Forest


@st.composite
def rows(draw):
    """Datums of a forest, in its order, some of them cut from the one before: tokens, offsets, places, shared."""
    datums = st.lists(st.integers(0, 1), min_size=1, max_size=24)
    tokens_D = draw(st.lists(datums.map(lambda end: np.array([9] * 16 + end, np.int32)), min_size=1, max_size=8))
    forest = Forest.find(tokens_D)
    shared = forest.shared.copy()
    shared[draw(st.integers(0, len(shared) - 1))] = 0
    return np.concatenate(tokens_D), np.concatenate([[0], np.cumsum(forest.lengths)]), forest.order, shared.tolist()


@given(rows())
def test_each_datum_finds_its_tokens_along_its_path(case):
    tokens, offsets, places, shared = case
    row = SharedRow(offsets, places, shared)
    lengths = offsets[places + 1] - offsets[places]
    assert len(row.index) == len(row.positions) == row.own_starts[-1] == lengths.sum() - sum(shared)
    assert row.longest_own == max(np.diff(row.own_starts))
    assert row.longest == max(lengths)
    depths = row.positions[row.path]
    for d, place in enumerate(places):
        path = slice(row.starts[d], row.starts[d + 1])
        assert tokens[row.index][row.path[path]].tolist() == tokens[offsets[place] : offsets[place + 1]].tolist()
        assert depths[path].tolist() == list(range(lengths[d]))
        own = range(row.own_starts[d], row.own_starts[d + 1])
        assert row.path[path][shared[d] :].tolist() == list(own)
        assert row.flat_index[path].tolist() == list(range(offsets[place], offsets[place + 1]))
        assert row.datum[path].tolist() == [d] * lengths[d]


@given(rows(), st.data())
def test_targets_with_the_same_place_and_temperature_have_one_row(case, data):
    _, offsets, places, shared = case
    row = SharedRow(offsets, places, shared)
    number = len(places)
    temperatures = np.array(data.draw(st.lists(st.sampled_from([0.5, 1.0]), min_size=number, max_size=number)))
    counted = np.array(data.draw(st.lists(st.booleans(), min_size=len(row.path), max_size=len(row.path))))
    head = HeadRows.of(row, temperatures.astype(np.float32), counted)
    expected = np.flatnonzero(counted).tolist() or [0]
    assert sorted(head.chosen.tolist()) == expected
    pairs = list(zip(head.hidden.tolist(), head.temperatures.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) == len(head.bounds) - 1
    for n, (place, temperature) in enumerate(pairs):
        targets = head.chosen[head.bounds[n] : head.bounds[n + 1]]
        assert len(targets)
        assert set(row.path[targets].tolist()) == {place}
        assert set(temperatures[row.datum[targets]].tolist()) == {temperature}
