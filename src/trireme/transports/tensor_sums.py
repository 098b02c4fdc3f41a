"""Computes the checksums (`trireme.core.digest.Sums`) of whole tensors and of parts of tensors, on any device.

A part says where its elements lie in the whole tensor: element [j_0, j_1, ...] of the part is element
`first + sum of j_d strides[d]` of the whole, counted in C order. So a rectangle of the whole has the strides of the
whole, whatever its own layout in memory. A part may be any view, such as a slice of a fused parameter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trireme.core.digest import WORD_BYTES, Sums, sums_of, sums_of_rows

PIECE_WORDS = 2**20
"""Words that are cast and summed at once, 2 MiB."""


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a tensor in C order.

    >>> c_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def rectangle(whole: Sequence[int], start: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Returns `first` and `strides` of a TensorPart that is a rectangle of a tensor of shape `whole`. `start`: the
    index of the rectangle's first element.

    >>> rectangle((4, 6), (1, 2))
    (8, (6, 1))
    """
    strides = c_strides(whole)
    return sum(at * stride for at, stride in zip(start, strides, strict=True)), strides


def merged(dimensions: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merges dimensions of an array that has two layouts, such as a part's memory and the whole tensor. Dimensions
    become one dimension if, in each layout, all their elements are evenly spaced. A kernel then has fewer dimensions to
    go through. Each of `dimensions` is (size, stride in the first layout, stride in the second layout). Returns the
    fewest such dimensions, at least one, that describe the same elements, with the smallest stride in the first layout
    first.

    >>> merged([(5, 24, 24), (3, 8, 8), (8, 1, 1)]), merged([(5, 24, 80), (3, 8, 8), (1, 8, 8), (8, 1, 1)])
    ([(120, 1, 1)], [(24, 1, 1), (5, 24, 80)])
    """
    joined: list[tuple[int, int, int]] = []
    for size, stride, other in sorted((dim for dim in dimensions if dim[0] > 1), key=lambda dim: dim[1:]):
        if joined and (stride, other) == (joined[-1][0] * joined[-1][1], joined[-1][0] * joined[-1][2]):
            joined[-1] = (joined[-1][0] * size, *joined[-1][1:])
        else:
            joined.append((size, stride, other))
    return joined or [(1, 1, 1)]


class TensorPart(NamedTuple):
    """One or more tensors whose checksums are computed together. They are in one storage, with equal shapes and
    strides. Each tensor is all or part of a published tensor; this published tensor is called its whole. Each tensor
    has the same place in its whole."""

    tensor: Tensor
    """The first of the tensors."""
    first: int
    """The place of a tensor's first element in its whole, in elements."""
    strides: Sequence[int]
    """For each dimension of a tensor, the distance in its whole from one element to the next, in elements."""
    dtype: torch.dtype
    """The dtype to which the tensors are converted before their checksums are computed."""
    tensors: int = 1
    """Number of tensors."""
    pace: int = 0
    """Distance in memory from one tensor to the next, in elements."""


def equal_parts(
    tensors: Sequence[Tensor], first: int, strides: Sequence[int], dtype: torch.dtype | None = None
) -> list[TensorPart]:
    """Returns `tensors` as parts, in order. The tensors have one storage, shape and strides. If they are evenly spaced
    in memory (experts of a stack), one TensorPart has all of them; else each tensor has one. `first`, `strides`: place
    and strides of each tensor in its whole, in elements. `dtype`: the dtype to which the tensors are converted before
    their checksums are computed (None: their own)."""
    start = tensors[0].detach()
    target = dtype or tensors[0].dtype
    paces = {int(b.storage_offset() - a.storage_offset()) for a, b in pairwise(tensors)} or {0}
    if len(paces) == 1 and min(paces) >= 0:
        return [TensorPart(start, first, strides, target, len(tensors), min(paces))]
    return [TensorPart(tensor.detach(), first, strides, target) for tensor in tensors]


def part_sums(parts: Sequence[TensorPart]) -> Tensor:
    """Returns the two checksums (`Sums.signed`) of each tensor of `parts`, in order: int64 [tensors, 2]. All tensors
    are on one device, and the result is on it too. Does not wait for the device.

    On CUDA, a kernel computes the checksums in a few launches. On a CPU, the kernel of `trireme.core.digest` computes
    them.
    """
    if parts[0].tensor.is_cuda:
        from trireme.transports.device_sums import device_sums  # imports Triton

        return device_sums(parts)
    return torch.tensor([sums for part in parts for sums in host_sums(part)], dtype=torch.int64).view(-1, 2)


def tensor_sums(tensor: Tensor) -> Tensor:
    """Returns the two checksums of a whole tensor, int64 [2] on its device, as `part_sums` does."""
    return part_sums([TensorPart(tensor.detach(), 0, c_strides(tensor.shape), tensor.dtype)])[0]


def host_sums(part: TensorPart) -> Iterator[tuple[int, int]]:
    """Yields for each tensor of a part its two checksums (`Sums.signed`), which the CPU computes."""
    limit = PIECE_WORDS * WORD_BYTES // part.dtype.itemsize
    start = part.tensor.storage_offset()
    for number in range(part.tensors):
        tensor = part.tensor.as_strided(part.tensor.shape, part.tensor.stride(), start + number * part.pace)
        total = Sums()
        for piece, first in _pieces(tensor, part.first, part.strides, limit):
            total += _piece_sums(piece.to("cpu", part.dtype).contiguous(), first, part.strides)
        yield total.signed


def to_sums(table: Tensor) -> list[Sums]:
    """Returns the rows of `table`, int64 [N, 2] on any device, as Sums."""
    return [Sums.from_signed(first, second) for first, second in table.tolist()]


def _pieces(part: Tensor, first: int, strides: Sequence[int], limit: int) -> Iterator[tuple[Tensor, int]]:
    """Yields pieces of `part` of at most `limit` elements, each with the place of its first element in the whole
    tensor. `first`, `strides`: place and strides of the part in the whole."""
    if part.numel() == 0:
        return
    if part.numel() <= limit:
        yield part, first
        return
    d = next(d for d, size in enumerate(part.shape) if size > 1)
    inner = part.numel() // part.shape[d]
    rows = max(1, limit // inner)
    for at in range(0, part.shape[d], rows):
        piece = part.narrow(d, at, min(rows, part.shape[d] - at))
        yield from _pieces(piece, first + at * strides[d], strides, limit)


def _piece_sums(piece: Tensor, first: int, strides: Sequence[int]) -> Sums:
    """Returns the checksums of `piece`, a contiguous CPU tensor. `first`, `strides`: the place of its first element,
    and its strides, in the whole tensor, in elements."""
    if piece.element_size() == 1:  # halves of words; zeros between them add nothing
        ends = ((size - 1) * stride for size, stride in zip(piece.shape, strides, strict=True))
        spread = torch.zeros(first % WORD_BYTES + sum(ends) + 1, dtype=torch.uint8)
        spread.as_strided(piece.shape, strides, first % WORD_BYTES).copy_(piece.view(torch.uint8))
        return sums_of(spread.numpy(), first // WORD_BYTES)
    words = piece.element_size() // WORD_BYTES
    sizes = [*piece.shape, words]
    dimensions = merged(zip(sizes, c_strides(sizes), [*(stride * words for stride in strides), 1], strict=True))
    if dimensions[0][2] != 1:
        dimensions = [(1, 1, 1), *dimensions]
    shape = [1, *(size for size, _, _ in reversed(dimensions))]
    steps = [0, *(step for _, _, step in reversed(dimensions))]
    places = [first * words]
    for size, step in zip(shape[:-2], steps[:-2], strict=True):
        places = [place + number * step for place in places for number in range(size)]
    total = Sums()
    for place, block in zip(places, _words_of(piece).reshape(-1, *shape[-2:]), strict=True):
        total += sums_of_rows(block, place, steps[-2])
    return total


def _words_of(piece: Tensor) -> npt.NDArray[np.uint16]:
    """Returns a view of a contiguous CPU tensor's memory as words; valid while the tensor lives. `Tensor.numpy` would
    mark the memory as shared for ever, and FSDP could no longer free a gathered parameter."""
    memory: Any = (ctypes.c_uint8 * piece.nbytes).from_address(piece.data_ptr())
    return np.frombuffer(memory, dtype=np.uint16)
