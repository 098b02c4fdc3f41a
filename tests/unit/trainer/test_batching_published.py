"""Inputs and expected numbers of other projects' tests of batches (tests/conformance/numbers.toml)."""

import numpy as np
import pytest

from trainer.batching import plan

FAR = 10**6
"""Tokens at which attention would cost as much as the rest: so long that cost is the number of tokens."""


def token_sums(lengths, micro_R):
    return [sum(int(lengths[d]) for m in micro_M if not m.filler for d in m.datums) for micro_M in micro_R]


@pytest.mark.parametrize(("datums", "ranks", "each"), [(4, 2, 2), (5, 2, 3), (7, 1, 7), (11, 4, 3)])
def test_ranks_get_as_many_micro_batches_and_the_rest_are_fillers(datums, ranks, each):
    micro_R = plan(np.full(datums, 4), ranks, 4, FAR, packed=True)
    assert [len(micro_M) for micro_M in micro_R] == [each] * ranks
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
