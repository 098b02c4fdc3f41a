"""The sums of tensors: those of their bytes, whatever the dtype, the way in memory, and how the whole is cut."""

from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from digest_support import plain_sums
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_parts import part_tensor_sums

from trireme.core.digest import Sums
from trireme.transports import tensor_sums as module
from trireme.transports.packing import DTYPES
from trireme.transports.tensor_sums import equal_parts, part_sums, rectangle, to_sums

SHAPES = st.lists(st.integers(0, 7), max_size=4)


def filled(shape: list[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes, whatever they mean: NaNs with payloads and subnormals among them."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, size, np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


def plain(tensor: torch.Tensor) -> Sums:
    return plain_sums(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def summed(*tables: torch.Tensor) -> Sums:
    return sum(to_sums(torch.stack(tables)), Sums())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@given(shape=SHAPES, seed=st.integers(0, 9))
@settings(max_examples=25)
def test_the_sums_are_those_of_the_bytes(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    tensor = filled(shape, dtype, seed)
    assert summed(part_tensor_sums(tensor)) == plain(tensor)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Draws a shape, and places at which each of its dimensions is cut."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    return shape, [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]


@pytest.mark.parametrize("name", ["BF16", "F32", "U8"])
@given(cut=cuts(), piece=st.integers(1, 60))
@settings(max_examples=40)
def test_rectangles_add_up_to_the_whole(name: str, cut: tuple[list[int], list[list[int]]], piece: int) -> None:
    """Views into the whole, with its strides in memory, and copies, in pieces of any size, one after the other."""
    shape, places = cut
    whole = filled(shape, DTYPES[name])
    total = Sums()
    with patch.object(module, "PIECE_WORDS", 4 * piece):
        for number, box in enumerate(product(*(pairwise(ends) for ends in places))):
            part = whole[tuple(slice(a, b) for a, b in box)]
            first, strides = rectangle(shape, [a for a, _ in box])
            total += summed(part_tensor_sums(part.clone() if number % 2 else part, first, strides))
    assert total == plain(whole)


def test_memory_in_another_order_is_summed_in_the_order_of_the_whole() -> None:
    whole = filled([6, 10], torch.bfloat16)
    transposed = whole.t().contiguous()
    assert summed(part_tensor_sums(transposed.t())) == plain(whole)
    parts = [part_tensor_sums(transposed[a : a + 5].t(), *rectangle(whole.shape, (0, a))) for a in (0, 5)]
    assert summed(*parts) == plain(whole)
    # `transposed` itself as a part: its columns are the rows of the whole.
    assert summed(part_tensor_sums(transposed, 0, (1, 10))) == plain(whole)


def test_a_cast_is_summed_piece_by_piece() -> None:
    master = torch.randn(70, 33)
    with patch.object(module, "PIECE_WORDS", 100):
        assert summed(part_tensor_sums(master, dtype=torch.bfloat16)) == plain(master.to(torch.bfloat16))


def test_parameters_and_tensors_without_elements_or_dimensions() -> None:
    assert summed(part_tensor_sums(torch.nn.Parameter(torch.ones(3)))) == plain(torch.ones(3))
    assert summed(part_tensor_sums(torch.ones(0, 5))) == Sums()
    assert summed(part_tensor_sums(torch.tensor(2.5))) == plain(torch.tensor(2.5).reshape(1))
    assert summed(part_tensor_sums(torch.ones(1, 2)[:, :1])) == plain(torch.ones(1)), "its stride is not 1"


def test_pieces_bound_the_memory() -> None:
    """A tensor of 64 MiB that is cast and cut along its columns: no copy is larger than a piece."""
    whole = torch.zeros(2048, 8192)
    pieces = list(module._pieces(whole[:, 100:8000], 100, (8192, 1), module.PIECE_WORDS))
    assert max(piece.numel() for piece, _ in pieces) <= module.PIECE_WORDS
    assert sum(piece.numel() for piece, _ in pieces) == 2048 * 7900


@pytest.mark.parametrize("name", ["BF16", "F32", "U8"])
@given(cut=cuts(), count=st.integers(1, 6), piece=st.integers(1, 60), order=st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_equal_parts_of_a_stack_have_the_sums_that_each_has_alone(
    name: str, cut: tuple[list[int], list[list[int]]], count: int, piece: int, order: Any
) -> None:
    """In any order and at any distances; also parts that are cut alike, and are cast."""
    shape, places = cut
    stack = filled([count, *shape], DTYPES[name])
    box = [(ends[0], ends[-1] if len(ends) < 3 else ends[-2]) for ends in places]
    parts = [whole[tuple(slice(a, b) for a, b in box)] for whole in stack]
    order.shuffle(parts)
    first, strides = rectangle(shape, [a for a, _ in box])
    if not parts[0].numel():
        return
    with patch.object(module, "PIECE_WORDS", 4 * piece):
        for dtype in (None, torch.bfloat16) if name == "F32" else (None,):
            alone = torch.stack([part_tensor_sums(part, first, strides, dtype) for part in parts])
            assert torch.equal(part_sums(equal_parts(parts, first, strides, dtype)), alone)
            if len(parts) > 1:
                assert torch.equal(part_sums(equal_parts(parts[:2], first, strides, dtype)), alone[:2])
