"""The plan holds for any lengths: each datum once, the budget kept, the same number of micro-batches on all ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.batching import MicroBatch, pad_rows, plan

cases = given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=80).map(lambda x: np.array(x, dtype=np.int64)),
    num_ranks=st.integers(1, 9),
    budget=st.integers(1, 200),
)


@cases
def test_every_datum_is_computed_exactly_once(lengths, num_ranks, budget):
    real = [d for micro_M in plan(lengths, num_ranks, budget) for m in micro_M if not m.filler for d in m.datums]
    assert sorted(real) == list(range(len(lengths)))


@cases
def test_the_budget_is_kept_unless_one_datum_exceeds_it(lengths, num_ranks, budget):
    for micro in (m for micro_M in plan(lengths, num_ranks, budget) for m in micro_M):
        padded = len(micro.datums) * max(lengths[list(micro.datums)])
        assert padded <= budget or len(micro.datums) == 1


@cases
def test_all_ranks_run_the_same_number(lengths, num_ranks, budget):
    micro_R = plan(lengths, num_ranks, budget)
    assert len(micro_R) == num_ranks
    assert len({len(micro_M) for micro_M in micro_R}) == 1
    assert any(not any(m.filler for m in micro_M) for micro_M in micro_R), "fillers only where another rank has more"


@cases
def test_ranks_are_balanced_to_within_one_datum(lengths, num_ranks, budget):
    tokens_R = [
        sum(int(lengths[list(m.datums)].sum()) for m in micro_M if not m.filler)
        for micro_M in plan(lengths, num_ranks, budget)
    ]
    assert max(tokens_R) - min(tokens_R) <= lengths.max()


def test_rows_of_near_equal_length_are_padded_together():
    micro_R = plan(np.array([10, 1, 9, 2]), 1, 20)
    assert micro_R == [[MicroBatch((0, 2)), MicroBatch((3, 1))]]


def test_a_rank_without_datums_runs_fillers():
    assert plan(np.array([5]), 2, 10) == [[MicroBatch((0,))], [MicroBatch((0,), filler=True)]]


def test_padding_is_on_the_right():
    values, offsets = np.arange(1, 7, dtype=np.int32), np.array([0, 3, 4, 6])
    assert pad_rows(values, offsets, (1, 0)).tolist() == [[4, 0, 0], [1, 2, 3]]
    assert pad_rows(values, offsets, (2,)).dtype == np.int32
