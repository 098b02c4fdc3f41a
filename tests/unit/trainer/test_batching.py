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
    OVER_LONGEST,
    FlatTokens,
    RankAssignment,
    balance,
    compute_cost,
    plan,
)
from trireme.core.prefixes import FEWEST_SHARED, Forest
from trireme.plan.memory import FLAT_TOKENS

ATTENTION = 10


def flat_plan(lengths, num_ranks, budget, attention_length, packed=False):
    assignment = RankAssignment(num_ranks, attention_length, "auto")
    return plan(Forest.flat(lengths), assignment, budget, packed=packed)


cases = given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=80).map(lambda x: np.array(x, dtype=np.int64)),
    num_ranks=st.integers(1, 9),
    budget=st.integers(1, 200),
)


@cases
def test_every_datum_is_computed_once_within_the_budget_by_ranks_that_run_the_same_number(lengths, num_ranks, budget):
    micro_R = flat_plan(lengths, num_ranks, budget, ATTENTION)
    assert len(micro_R) == num_ranks
    assert len({len(micro_M) for micro_M in micro_R}) == 1
    assert any(not any(m.filler for m in micro_M) for micro_M in micro_R), "fillers only where another rank has more"
    micro_batches = [m for micro_M in micro_R for m in micro_M]
    assert sorted(d for m in micro_batches if not m.filler for d in m.datums) == list(range(len(lengths)))
    for micro in micro_batches:
        padded_tokens = len(micro.datums) * max(lengths[list(micro.datums)])
        assert padded_tokens <= budget or len(micro.datums) == 1, "one datum may exceed it"


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


def test_padding_is_on_the_right():
    values, offsets = np.arange(1, 7, dtype=np.int32), np.array([0, 3, 4, 6])
    assert FlatTokens(offsets, (1, 0)).pad(values).tolist() == [[4, 0, 0], [1, 2, 3]]
    assert FlatTokens(offsets, (2,)).pad(values).tolist() == [[5, 6]]
    assert FlatTokens(offsets, (2,)).pad(values).dtype == np.int32
    assert FlatTokens(offsets, (1, 0)).pad(np.full(6, np.nan, np.float32))[0, 1] == 0, (
        "padding is 0, whatever is elsewhere"
    )


@cases
def test_packed_rows_hold_every_datum_once_within_the_budget(lengths, num_ranks, budget):
    micro_R = flat_plan(lengths, num_ranks, budget, ATTENTION, packed=True)
    rows = [m for micro_M in micro_R for m in micro_M]
    assert sorted(d for m in rows if not m.filler for d in m.datums) == list(range(len(lengths)))
    assert len({len(micro_M) for micro_M in micro_R}) == 1
    for row in rows:
        assert sum(lengths[list(row.datums)]) <= budget or len(row.datums) == 1


@cases
def test_no_two_packed_rows_of_a_rank_would_fit_in_one(lengths, num_ranks, budget):
    for micro_M in flat_plan(lengths, num_ranks, budget, ATTENTION, packed=True):
        sums = sorted(sum(lengths[list(m.datums)]) for m in micro_M if not m.filler)
        assert len(sums) < 2 or sums[0] + sums[1] > budget


def padded(micro_M, lengths):
    return sum(len(m.datums) * int(max(lengths[list(m.datums)])) for m in micro_M)


@cases
def test_no_other_cut_computes_less(lengths, num_ranks, budget):
    """Against all ways to cut the first few datums."""
    ordered = np.sort(lengths[:9])[::-1].copy()
    [micro_M] = flat_plan(ordered, 1, budget, ATTENTION)
    got = padded(micro_M, ordered) + len(micro_M) * MICRO_BATCH_COST
    for ends in itertools.product([False, True], repeat=len(ordered) - 1):
        edges = [0, *(i + 1 for i, end in enumerate(ends) if end), len(ordered)]
        sizes = [(b - a) * int(ordered[a]) for a, b in itertools.pairwise(edges)]
        within = all(
            size <= budget or b - a == 1 for size, (a, b) in zip(sizes, itertools.pairwise(edges), strict=True)
        )
        assert not within or got <= sum(sizes) + len(sizes) * MICRO_BATCH_COST


def test_flat_tokens_follow_each_other():
    offsets = np.array([0, 2, 5, 6])
    tokens = np.array([10, 11, 20, 21, 22, 30])
    flat = FlatTokens(offsets, (1, 2, 0))
    assert tokens[flat.index].tolist() == [20, 21, 22, 30, 10, 11]
    assert flat.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert flat.datum.tolist() == [0, 0, 0, 1, 2, 2]
    assert (flat.starts.tolist(), flat.starts.dtype) == ([0, 3, 4, 6], np.int32)
    assert (flat.places.tolist(), flat.shape) == ([0, 1, 2, 3, 6, 7], (3, 3))
    assert flat.pad(tokens).tolist() == [[20, 21, 22], [30, 0, 0], [10, 11, 0]]


# ---- inputs and expected numbers of other projects' tests (tests/conformance/numbers.toml)


FAR = 10**6
"""Tokens at which attention would cost as much as the rest: so long that cost is the number of tokens."""


def token_sums(lengths, micro_R):
    return [sum(int(lengths[d]) for m in micro_M if not m.filler for d in m.datums) for micro_M in micro_R]


@pytest.mark.parametrize(("datums", "ranks", "count"), [(4, 2, 2), (5, 2, 3), (7, 1, 7), (11, 4, 3)])
def test_ranks_get_as_many_micro_batches_and_the_rest_are_fillers(datums, ranks, count):
    micro_R = flat_plan(np.full(datums, 4), ranks, 4, FAR, packed=True)
    assert [len(micro_M) for micro_M in micro_R] == [count] * ranks
    assert sum(not m.filler for micro_M in micro_R for m in micro_M) == datums


def test_datums_are_dealt_out_by_tokens():
    lengths = np.array([100, 90, 80, 70])
    assert token_sums(lengths, flat_plan(lengths, 2, 100, FAR, packed=True)) == [170, 170]


def test_long_datums_are_paired_with_short_ones():
    lengths = np.array([32, 32, 16, 16, 16, 16])
    for micro_M in flat_plan(lengths, 2, 32, 16, packed=True):
        assert sorted(sorted(int(lengths[d]) for d in m.datums) for m in micro_M) == [[16, 16], [32]]


@pytest.mark.parametrize(
    ("lengths", "budget"), [([6, 6, 5, 5, 4, 4], 12), ([20, 18, 9, 9, 8, 8, 8], 64)], ids=["equal", "unequal"]
)
def test_no_rank_computes_a_filler_where_each_can_have_a_datum(lengths, budget):
    micro_R = flat_plan(np.array(lengths), 4, budget, FAR, packed=True)
    assert not any(m.filler for micro_M in micro_R for m in micro_M)
    assert sorted(lengths[d] for micro_M in micro_R for m in micro_M for d in m.datums) == sorted(lengths)


# ---- shared prefixes


@st.composite
def forests(draw):
    """Groups of datums with common beginnings, as their forest, and the tokens of each."""
    tokens_N = []
    for group in range(draw(st.integers(1, 5))):
        stem = [group * 100] * draw(st.integers(FEWEST_SHARED, 40))
        ends = draw(st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=12), min_size=1, max_size=8))
        tokens_N.append([np.array(stem + end, np.int32) for end in ends])
    return Forest.find_in_groups(tokens_N), [tokens for tokens_D in tokens_N for tokens in tokens_D]


shared_cases = given(forest=forests(), num_ranks=st.integers(1, 5), budget=st.integers(1, 400))


@shared_cases
def test_with_shared_prefixes_every_datum_is_computed_once_where_it_was_sent(forest, num_ranks, budget):
    forest, tokens_D = forest
    for share in ("on", "auto"):
        assignment = pickle.loads(pickle.dumps(RankAssignment(num_ranks, ATTENTION, share)))
        for shares in (True, False):
            micro_R = plan(forest, assignment, budget, shares=shares)
            assert len({len(micro_M) for micro_M in micro_R}) == 1
            real_R = [[micro for micro in micro_M if not micro.filler] for micro_M in micro_R]
            computed_R = [sorted(d for micro in micro_M for d in micro.datums) for micro_M in real_R]
            assert computed_R == [numbers.tolist() for numbers in assignment(forest)]
            assert sorted(d for computed in computed_R for d in computed) == list(range(len(forest)))
            for micro in (micro for micro_M in real_R for micro in micro_M):
                assert bool(micro.shared) == (shares and assignment.trees(forest) is not None)
                check_shared(micro, tokens_D, budget)


def check_shared(micro, tokens_D, budget):
    """Each datum begins as the one before it does, and distinct tokens and columns are within their bounds."""
    for n, shared in enumerate(micro.shared):
        assert shared == 0 or n > 0
        pair = [tokens_D[d][:shared].tolist() for d in (micro.datums[n - 1], micro.datums[n])]
        assert pair[0] == pair[1]
        assert len(pair[0]) == shared
    whole, shared = micro.sizes(np.array([len(tokens) for tokens in tokens_D]))
    if micro.shared:
        most_tokens = max(budget, OVER_LONGEST * max(map(len, tokens_D)))
        assert (whole - shared).sum() <= most_tokens
        assert len(whole) * max(whole) <= FLAT_TOKENS * most_tokens


def test_a_tree_stays_on_a_rank_unless_it_costs_more_than_a_rank_s_mean():
    two = Forest.find_in_groups([[np.arange(50, dtype=np.int32)] * 4] * 2)
    assert [d.tolist() for d in RankAssignment(2, FAR, "on")(two)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    tails = [np.array([*range(100), *[n] * 50], np.int32) for n in range(8)]
    one = Forest.find(tails)
    trees_R = RankAssignment(2, FAR, "on").trees(one)
    assert [[tree.shared.tolist() for tree in trees] for trees in trees_R] == [[[0, 100, 100, 100]]] * 2, "cut in two"


def test_a_datum_costs_what_its_own_tokens_do():
    """Of n tokens, s of which are another's: (n - s) a + n^2 - s^2. Two halves of a tree both compute the prefix."""
    tails = [np.array([*range(100), *[n] * 50], np.int32) for n in range(4)]
    alone = 100 * ATTENTION + 100**2
    own = 50 * ATTENTION + 150**2 - 100**2
    for num_ranks, costs in ((1, [alone + 4 * own]), (2, [alone + 2 * own] * 2)):
        trees, cost_N = RankAssignment(num_ranks, ATTENTION, "on")._cut_trees(Forest.find(tails))
        assert cost_N.tolist() == costs
        assert [len(tree.datums) for tree in trees] == [4 // num_ranks] * num_ranks


def test_halves_of_unequal_cost_are_not_cut_again():
    tails = [np.array([*range(100), *[n] * end], np.int32) for n, end in enumerate((50, 45, 55, 48, 52, 60))]
    trees_R = RankAssignment(2, FAR, "on").trees(Forest.find(tails))
    assert [len(trees) for trees in trees_R] == [1, 1]


def test_auto_shares_what_saves_a_twentieth_of_the_highest_cost_of_a_rank():
    def forest(stem, end):
        return Forest.find([np.array([*range(stem), *[n] * end], np.int32) for n in range(2)])

    auto = RankAssignment(1, FAR, "auto")
    assert auto.trees(forest(20, 30)) is not None, "20 of 100"
    assert auto.trees(forest(20, 300)) is None, "20 of 640"
    assert RankAssignment(1, FAR, "on").trees(forest(20, 300)) is not None
    assert RankAssignment(1, FAR, "off").trees(forest(20, 30)) is None
    # two ranks have a datum each: a cut tree saves nothing
    assert RankAssignment(2, FAR, "auto").trees(forest(20, 30)) is None


def test_answers_to_a_prompt_longer_than_a_row_share_it():
    forest = Forest.find([np.array([*range(100), *[n] * 5], np.int32) for n in range(16)])
    [micro_M] = plan(forest, RankAssignment(1, FAR, "on"), 50, shares=True)
    assert [len(micro.datums) for micro in micro_M] == [6, 6, 4], "105 + 5 * 5 <= 1.25 * 105"


def test_64_answers_to_30_000_tokens_are_cut_by_the_columns_that_they_have():
    """Their 2 million tokens, of which 42,800 are distinct, would fit into two rows by these alone."""
    forest = Forest.find([np.array([*range(30_000), *[n] * 200], np.int32) for n in range(64)])
    [micro_M] = plan(forest, RankAssignment(1, FAR, "on"), 32_768, shares=True)
    assert [len(micro.datums) for micro in micro_M] == [10] * 6 + [4], "10 * 30,200 = 8 * 1.25 * 30,200"


def test_a_long_datum_makes_long_columns_for_few_short_ones():
    stems = [np.arange(20, dtype=np.int32)] * 100
    forest = Forest.find([*stems, np.arange(1000, 1900, dtype=np.int32)])
    [micro_M] = plan(forest, RankAssignment(1, FAR, "on"), 1000, shares=True)
    assert [len(micro.datums) for micro in micro_M] == [1, 100], "101 * 900 > 8 * 1,125"
