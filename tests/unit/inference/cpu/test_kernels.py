"""Batches are multiplied in few sizes."""

from inference.cpu.kernels import round_up


def test_batches_have_few_sizes_and_grow_by_an_eighth_at_most() -> None:
    sizes = [round_up(rows) for rows in range(1, 8193)]
    assert all(rows <= size <= rows * 9 / 8 for rows, size in enumerate(sizes, start=1))
    assert sizes[:16] == list(range(1, 17))
    assert (len(set(sizes[:256])), len(set(sizes))) == (48, 88)
