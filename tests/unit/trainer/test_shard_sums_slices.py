"""Which part of which parameter a published tensor is, and what each shard has of it."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from digest_support import plain_sums
from hypothesis import given
from hypothesis import strategies as st
from tensor_parts import part_tensor_sums

from trainer.shard_sums import Slice, find_slices
from trireme.core.digest import Sums
from trireme.transports.tensor_sums import rectangle, to_sums

FUSED = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)


CHANGES = {
    "as it is": (lambda p: p, ((4, 6, 5), (30, 5, 1), 0)),
    "a copy of a part": (lambda p: p[1:3, 2].clone(), ((2, 5), (30, 1), 40)),
    "transposed": (lambda p: p[2].t().contiguous(), ((5, 6), (1, 5), 60)),
    "flat": (lambda p: p.reshape(-1), ((120,), (1,), 0)),
    "each second": (lambda p: p[::2, :, 0].contiguous(), ((2, 6), (60, 5), 0)),
    "repeated": (lambda p: p[0, 0].expand(3, 5).contiguous(), ((3, 5), (0, 1), 0)),
    "flat after a transposition": (lambda p: p[0].t().reshape(-1), None),
    "a copy in another form": (lambda p: p.transpose(0, 1).contiguous().view(12, 10), None),
    "put together": (lambda p: torch.cat([p[0], p[1]]), None),
    "rounded": (lambda p: p.bfloat16(), None),
    "computed": (lambda p: p + 1, None),
    "computed in place": (lambda p: p.add_(1), None),
    "a copy that is written to": (lambda p: p.clone().mul_(2), None),
    "other bits": (lambda p: p.view(torch.int32), None),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_what_a_published_tensor_is_of_a_parameter(change, expected):
    (view,) = find_slices({"p": FUSED}, lambda tensors: {"t": change(tensors["p"])}).values()
    assert view == (expected and Slice(FUSED, *expected))
    if view:
        assert torch.equal(FUSED.as_strided(*expected), change(FUSED))


@st.composite
def splits(draw):
    """Draws a parameter, a view of it, and rows at which it is cut into shards, some of them empty."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    whole = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    view = whole
    for d, size in enumerate(shape):
        begin = draw(st.integers(0, size - 1))
        view = view.narrow(d, begin, draw(st.integers(1, size - begin)))
    if draw(st.booleans()):
        view = view[:: draw(st.integers(1, 3))]
    if draw(st.booleans()):
        view = view.squeeze()
    view = view.permute(draw(st.permutations(range(view.ndim))))
    edges = sorted({0, shape[0]} | set(draw(st.lists(st.integers(0, shape[0]), max_size=3))))
    return whole, view, [*edges, shape[0]]


@given(splits())
def test_the_rows_of_shards_are_rectangles_that_add_up(split):
    whole, view, edges = split
    part = Slice(whole, tuple(view.shape), view.stride(), view.storage_offset())
    assert part.is_rectangle_of_rows
    total = Sums()
    for begin, end in pairwise(edges):
        local, start = part.of_rows(whole[begin:end].clone(), begin, end)
        total += to_sums(part_tensor_sums(local, *rectangle(view.shape, start))[None])[0]
    assert total == plain_sums(view.contiguous().numpy().tobytes())


def test_rows_in_two_dimensions_are_no_rectangle():
    """Heads of rows, cut in the middle of a head; and a flat tensor, cut in the middle of nothing."""
    whole = torch.zeros(6, 4)
    heads, flat = whole.view(3, 2, 4), whole.view(-1)
    for view in (heads, flat):
        assert not Slice(whole, tuple(view.shape), view.stride(), 0).is_rectangle_of_rows
