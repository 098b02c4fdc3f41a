"""The plan holds for any lengths: each datum once, the budget kept, the same number of micro-batches on all ranks."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.batching import (
    GOOD_ENOUGH,
    MICRO_BATCH_COST,
    MicroBatch,
    Packed,
    RankAssignment,
    Rows,
    balance,
    compute_cost,
    plan,
)

ATTENTION = 10

cases = given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=80).map(lambda x: np.array(x, dtype=np.int64)),
    num_ranks=st.integers(1, 9),
    budget=st.integers(1, 200),
)


@cases
def test_every_datum_is_computed_exactly_once(lengths, num_ranks, budget):
    real = [
        d for micro_M in plan(lengths, num_ranks, budget, ATTENTION) for m in micro_M if not m.filler for d in m.datums
    ]
    assert sorted(real) == list(range(len(lengths)))


@cases
def test_the_budget_is_kept_unless_one_datum_exceeds_it(lengths, num_ranks, budget):
    for micro in (m for micro_M in plan(lengths, num_ranks, budget, ATTENTION) for m in micro_M):
        padded = len(micro.datums) * max(lengths[list(micro.datums)])
        assert padded <= budget or len(micro.datums) == 1


@cases
def test_all_ranks_run_the_same_number(lengths, num_ranks, budget):
    micro_R = plan(lengths, num_ranks, budget, ATTENTION)
    assert len(micro_R) == num_ranks
    assert len({len(micro_M) for micro_M in micro_R}) == 1
    assert any(not any(m.filler for m in micro_M) for micro_M in micro_R), "fillers only where another rank has more"


def loads(costs, datums_R):
    return np.array([costs[datums].sum() for datums in datums_R])


@cases
def test_ranks_are_balanced_to_within_one_datum(lengths, num_ranks, budget):
    costs = compute_cost(lengths, ATTENTION)
    load_R = loads(costs, balance(costs, num_ranks))
    assert max(load_R) - min(load_R) <= costs.max()
    # a bound for what is left after the first pass alone (Graham 1969); swaps can only lower the maximum
    assert max(load_R) * num_ranks <= costs.sum() + costs.max() * (num_ranks - 1)


def test_many_unequal_datums_are_balanced_by_what_they_cost():
    lengths = np.random.default_rng(0).lognormal(8, 0.8, 1024).clip(64, 16384).astype(np.int64)
    costs = compute_cost(lengths, 8192)
    load_R = loads(costs, balance(costs, 64))
    assert max(load_R) <= load_R.mean() * (1 + GOOD_ENOUGH)
    tokens_R = loads(lengths, balance(costs, 64))
    assert max(tokens_R) > tokens_R.mean() * (1 + 10 * GOOD_ENOUGH), "tokens alone would have been another goal"


def test_rows_of_near_equal_length_are_padded_together():
    micro_R = plan(np.array([10, 1, 9, 2]), 1, 20, ATTENTION)
    assert micro_R == [[MicroBatch((0, 2)), MicroBatch((3, 1))]]


def test_padding_is_on_the_right():
    values, offsets = np.arange(1, 7, dtype=np.int32), np.array([0, 3, 4, 6])
    assert Rows(offsets, (1, 0)).pad(values).tolist() == [[4, 0, 0], [1, 2, 3]]
    assert Rows(offsets, (2,)).pad(values).tolist() == [[5, 6]]
    assert Rows(offsets, (2,)).pad(values).dtype == np.int32
    assert Rows(offsets, (1, 0)).pad(np.full(6, np.nan, np.float32))[0, 1] == 0, "padding is 0, whatever is elsewhere"


@cases
def test_packed_rows_hold_every_datum_once_within_the_budget(lengths, num_ranks, budget):
    micro_R = plan(lengths, num_ranks, budget, ATTENTION, packed=True)
    rows = [m for micro_M in micro_R for m in micro_M]
    assert sorted(d for m in rows if not m.filler for d in m.datums) == list(range(len(lengths)))
    assert len({len(micro_M) for micro_M in micro_R}) == 1
    for row in rows:
        assert sum(lengths[list(row.datums)]) <= budget or len(row.datums) == 1


@cases
def test_no_two_packed_rows_of_a_rank_would_fit_in_one(lengths, num_ranks, budget):
    for micro_M in plan(lengths, num_ranks, budget, ATTENTION, packed=True):
        sums = sorted(sum(lengths[list(m.datums)]) for m in micro_M if not m.filler)
        assert len(sums) < 2 or sums[0] + sums[1] > budget


def padded(micro_M, lengths):
    return sum(len(m.datums) * int(max(lengths[list(m.datums)])) for m in micro_M)


@cases
def test_no_other_cut_computes_less(lengths, num_ranks, budget):
    """Against all ways to cut the first few datums."""
    ordered = np.sort(lengths[:9])[::-1].copy()
    [micro_M] = plan(ordered, 1, budget, ATTENTION)
    got = padded(micro_M, ordered) + len(micro_M) * MICRO_BATCH_COST
    for ends in itertools.product([False, True], repeat=len(ordered) - 1):
        edges = [0, *(i + 1 for i, end in enumerate(ends) if end), len(ordered)]
        sizes = [(b - a) * int(ordered[a]) for a, b in itertools.pairwise(edges)]
        within = all(
            size <= budget or b - a == 1 for size, (a, b) in zip(sizes, itertools.pairwise(edges), strict=True)
        )
        assert not within or got <= sum(sizes) + len(sizes) * MICRO_BATCH_COST


def test_packed_tokens_return_to_rows():
    offsets = np.array([0, 2, 5, 6])
    tokens = np.array([10, 11, 20, 21, 22, 30])
    packed = Packed(offsets, (1, 2, 0))
    assert tokens[packed.index].tolist() == [20, 21, 22, 30, 10, 11]
    assert packed.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.datum.tolist() == [0, 0, 0, 1, 2, 2]
    assert (packed.starts.tolist(), packed.starts.dtype) == ([0, 3, 4, 6], np.int32)
    assert packed.rows.pad(tokens[packed.index]).tolist() == [[20, 21, 22], [30, 0, 0], [10, 11, 0]]


@cases
def test_by_number_of_sequences_every_datum_is_computed_once_and_no_part_has_more(lengths, num_ranks, budget):
    size = 1 + budget % 4
    micro_R = plan(lengths, num_ranks, 1, ATTENTION, micro_batch_size=size)
    assert len({len(micro_M) for micro_M in micro_R}) == 1
    real = [micro.datums for micro_M in micro_R for micro in micro_M if not micro.filler]
    assert sorted(d for datums in real for d in datums) == list(range(len(lengths)))
    assert max(len(datums) for datums in real) <= size


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 5), st.booleans())
def test_who_knows_the_lengths_knows_which_rank_computes_a_datum(lengths, num_ranks, packed):
    assignment = pickle.loads(pickle.dumps(RankAssignment(num_ranks, 100)))
    planned = plan(np.array(lengths), num_ranks, 64, 100, packed)
    own_R = [sorted(d for micro in micro_M if not micro.filler for d in micro.datums) for micro_M in planned]
    assert [indices.tolist() for indices in assignment(np.array(lengths))] == own_R


# ---- inputs and expected numbers of other projects' tests (tests/conformance/numbers.toml)


FAR = 10**6
"""Tokens at which attention would cost as much as the rest: so long that cost is the number of tokens."""


def token_sums(lengths, micro_R):
    return [sum(int(lengths[d]) for m in micro_M if not m.filler for d in m.datums) for micro_M in micro_R]


@pytest.mark.parametrize(("datums", "ranks", "count"), [(4, 2, 2), (5, 2, 3), (7, 1, 7), (11, 4, 3)])
def test_ranks_get_as_many_micro_batches_and_the_rest_are_fillers(datums, ranks, count):
    micro_R = plan(np.full(datums, 4), ranks, 4, FAR, packed=True)
    assert [len(micro_M) for micro_M in micro_R] == [count] * ranks
    assert sum(not m.filler for micro_M in micro_R for m in micro_M) == datums


def test_datums_are_dealt_out_by_tokens():
    lengths = np.array([100, 90, 80, 70])
    assert token_sums(lengths, plan(lengths, 2, 100, FAR, packed=True)) == [170, 170]


def test_long_datums_are_paired_with_short_ones():
    lengths = np.array([32, 32, 16, 16, 16, 16])
    for micro_M in plan(lengths, 2, 32, 16, packed=True):
        assert sorted(sorted(int(lengths[d]) for d in m.datums) for m in micro_M) == [[16, 16], [32]]


@pytest.mark.parametrize(
    ("lengths", "budget"), [([6, 6, 5, 5, 4, 4], 12), ([20, 18, 9, 9, 8, 8, 8], 64)], ids=["equal", "unequal"]
)
def test_no_rank_computes_a_filler_where_each_can_have_a_datum(lengths, budget):
    micro_R = plan(np.array(lengths), 4, budget, FAR, packed=True)
    assert not any(m.filler for micro_M in micro_R for m in micro_M)
    assert sorted(lengths[d] for micro_M in micro_R for m in micro_M for d in m.datums) == sorted(lengths)
