"""The sums of `trireme.core.digest` of tensors on any device, whole or in part.

A part says where its elements lie in the whole tensor: element [j_0, j_1, ...] of the part is element
`first + sum of j_d strides[d]` of the whole, counted in C order. So a rectangle of the whole has the strides of the
whole, whatever its own place in memory, and a slice of a fused parameter is any view.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trireme.core.digest import GOLDEN, MIX_1, MIX_2, WORD_BYTES, Sums, sums_of, sums_of_rows

PIECE_WORDS = 2**20
"""Words that are summed at once: tensor operations take five int64 numbers for each, 40 MiB in all."""


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a tensor in C order.

    >>> c_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def rectangle(whole: Sequence[int], start: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Returns `first` and `strides` of a part that begins at `start` of a tensor of shape `whole`.

    >>> rectangle((4, 6), (1, 2))
    (8, (6, 1))
    """
    strides = c_strides(whole)
    return sum(at * stride for at, stride in zip(start, strides, strict=True)), strides


class TensorPart(NamedTuple):
    """Tensors of one storage, with equal shapes and strides, each at the same place of its whole."""

    tensor: Tensor
    """The first of them."""
    first: int
    """The place of its first element in its whole, in elements."""
    strides: Sequence[int]
    """The strides of its whole, in elements."""
    dtype: torch.dtype
    """The dtype in which it is summed."""
    tensors: int = 1
    """Number of tensors."""
    pace: int = 0
    """Distance in memory from one tensor to the next, in elements."""


def equal_parts(
    tensors: Sequence[Tensor], first: int, strides: Sequence[int], dtype: torch.dtype | None = None
) -> list[TensorPart]:
    """Returns the parts, in order, that are tensors of one storage with equal shapes and strides, all at the same place
    of their wholes: one part if they are at equal distances in memory, such as experts of a stack. `dtype`: that in
    which they are summed (None: their own)."""
    start, target = tensors[0].detach(), dtype or tensors[0].dtype
    paces = {int(b.storage_offset() - a.storage_offset()) for a, b in pairwise(tensors)} or {0}
    if len(paces) == 1 and min(paces) >= 0:
        return [TensorPart(start, first, strides, target, len(tensors), min(paces))]
    return [TensorPart(tensor.detach(), first, strides, target) for tensor in tensors]


def part_sums(parts: Sequence[TensorPart]) -> Tensor:
    """Returns the sums of all tensors of `parts`, which are on one device, in order: int64 [tensors, 2]
    (`Sums.signed`), there, for which nothing waits.

    On CUDA a kernel computes them in a few launches. Elsewhere it takes at most 64 MiB alongside the tensors, whatever
    their sizes, dtypes and strides.
    """
    if parts[0].tensor.is_cuda:
        from trireme.transports.device_sums import device_sums  # imports Triton

        return device_sums(parts)
    return torch.cat([operation_sums(part) for part in parts])


def tensor_sums(
    part: Tensor, first: int = 0, strides: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the sums of one tensor, int64 [2] on its device, as `part_sums` does. `strides`: of the whole tensor
    (None: the part is contiguous in it). `dtype`: that in which it is summed (None: its own)."""
    steps = c_strides(part.shape) if strides is None else tuple(strides)
    return part_sums([TensorPart(part.detach(), first, steps, dtype or part.dtype)])[0]


def operation_sums(part: TensorPart) -> Tensor:
    """Returns the sums of the tensors of a part, int64 [tensors, 2] on their device, by tensor operations or, on a CPU,
    by the kernel of `trireme.core.digest`. Small tensors are summed together."""
    first, strides, dtype = part.first, part.strides, part.dtype
    most = PIECE_WORDS * WORD_BYTES // dtype.itemsize
    at_once = most // max(part.tensor.numel(), 1) if dtype.itemsize > 1 and part.tensor.numel() else 1
    found = []
    for at in range(0, part.tensors, max(at_once, 1)):
        count = min(max(at_once, 1), part.tensors - at)
        start = part.tensor.storage_offset() + at * part.pace
        sizes, steps = (count, *part.tensor.shape), (part.pace, *part.tensor.stride())
        stack = part.tensor.as_strided(sizes, steps, start)
        if count > 1:
            found.append(_stack_sums(stack.to(dtype).contiguous(), first, strides))
            continue
        total = torch.zeros(1, 2, dtype=torch.int64, device=stack.device)
        for piece, place in _pieces(stack[0], first, strides, most):
            total += _piece_sums(piece.to(dtype).contiguous(), place, strides)
        found.append(total)
    return torch.cat(found)


def to_sums(table: Tensor) -> list[Sums]:
    """Returns the sums that are the rows of int64 [N, 2], which may be on a device."""
    return [Sums.from_signed(first, second) for first, second in table.tolist()]


def _pieces(part: Tensor, first: int, strides: Sequence[int], most: int) -> Iterator[tuple[Tensor, int]]:
    """Cuts `part` into pieces of at most `most` elements, each with the place of its first in the whole."""
    if part.numel() == 0:
        return
    if part.numel() <= most:
        yield part, first
        return
    d = next(d for d, size in enumerate(part.shape) if size > 1)
    inner = part.numel() // part.shape[d]
    rows = max(1, most // inner)
    for at in range(0, part.shape[d], rows):
        piece = part.narrow(d, at, min(rows, part.shape[d] - at))
        yield from _pieces(piece, first + at * strides[d], strides, most)


def _piece_sums(piece: Tensor, first: int, strides: Sequence[int]) -> Tensor:
    """Sums a contiguous piece, int64 [2] on its device."""
    if piece.element_size() > 1:
        return _stack_sums(piece[None], first, strides)[0]
    shape, strides = _merged(piece.shape, strides)
    flat = piece.as_strided((piece.numel(),), (1,))  # of dimensions of size 1 the strides say nothing
    return _sums_of_bytes(flat.view(torch.uint8), first, shape, strides)


def _stack_sums(stack: Tensor, first: int, strides: Sequence[int]) -> Tensor:
    """Sums each tensor of a contiguous stack, of more than a byte an element: int64 [tensors, 2] on its device."""
    words = stack.element_size() // WORD_BYTES
    shape, strides = _merged([*stack.shape[1:], words], [*(stride * words for stride in strides), 1])
    count, size = len(stack), stack.numel() // len(stack)
    flat = stack.as_strided((count, size), (size, 1)).view(torch.int16)
    if _by_kernel(flat):
        return _sums_by_rows(flat, first * words, shape, strides)
    return _weighed(flat.to(torch.int64).bitwise_and_(0xFFFF), _indices(shape, first * words, strides, flat.device))


def _by_kernel(flat: Tensor) -> bool:
    """Returns True where the kernel of `trireme.core.digest` can read: on a CPU it is some fifty times as
    fast as tensor operations."""
    return flat.device.type == "cpu"


def _bytes_of(flat: Tensor) -> npt.NDArray[np.uint8]:
    """Returns the memory of a contiguous tensor on the CPU, as long as that lives. `Tensor.numpy` would mark it as
    shared for ever, and FSDP could no longer free a gathered parameter."""
    memory: Any = (ctypes.c_uint8 * flat.nbytes).from_address(flat.data_ptr())
    return np.frombuffer(memory, dtype=np.uint8)


def _merged(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the same with as few dimensions as tell the places, at least one."""
    sizes, steps = [1], [1]
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if sizes[-1] == 1 or steps[-1] == size * stride:
            sizes[-1], steps[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            steps.append(stride)
    return sizes, steps


def _sums_by_rows(flat: Tensor, first: int, shape: list[int], strides: list[int]) -> Tensor:
    """Sums words, int16 [tensors, words] on the CPU, by the kernel, which knows rows: int64 [tensors, 2]."""
    words = _bytes_of(flat).view(np.uint16)
    rows, row = (shape[-2] if len(shape) > 1 else 1), shape[-1]
    step = strides[-2] if len(shape) > 1 else 0
    if strides[-1] != 1:
        shape, strides = [*shape, 1], [*strides, 1]
        rows, row, step = shape[-2], 1, strides[-2]
    outer = _indices(shape[:-2] or [1], first, strides[:-2] or [0], flat.device).tolist()
    found = []
    for blocks in words.reshape(len(flat), -1, rows, row):
        sums = Sums()
        for at, block in zip(outer, blocks, strict=True):
            sums += sums_of_rows(block, at, step)
        found.append(sums.signed)
    return torch.tensor(found)


def _sums_of_bytes(flat: Tensor, first: int, shape: list[int], strides: list[int]) -> Tensor:
    """Sums bytes, uint8, which are halves of words: the bytes at odd places are the upper ones."""
    if _by_kernel(flat) and len(shape) == 1 and strides == [1] and first % WORD_BYTES == 0:
        return torch.tensor(sums_of(_bytes_of(flat), first // WORD_BYTES).signed)
    places = _indices(shape, first, strides, flat.device)
    return _weighed(flat.to(torch.int64) << (places % WORD_BYTES * 8), places // WORD_BYTES)


def _indices(shape: Sequence[int], first: int, strides: Sequence[int], device: torch.device) -> Tensor:
    """Returns the place of each element in the whole, int64 [elements]."""
    places = torch.full((1,), first, dtype=torch.int64, device=device)
    for size, stride in zip(shape, strides, strict=True):
        steps = torch.arange(size, dtype=torch.int64, device=device).mul_(stride)
        places = (places[:, None] + steps).reshape(-1)
    return places


def _weighed(words: Tensor, places: Tensor) -> Tensor:
    """Returns the two sums of words from 0 to 2^16 - 1, int64 [..., words], at their places, int64 [words]: int64
    [..., 2]."""
    x = places * 2
    return torch.stack([(_keys(x + k) * words).sum(-1) for k in range(2)], -1)


def _keys(x: Tensor) -> Tensor:
    """Computes splitmix64(x) | 1 in the memory of `x`: int64 arithmetic wraps around."""
    x.add_(_wrapped(GOLDEN))
    x.bitwise_xor_(_shifted(x, 30)).mul_(_wrapped(MIX_1))
    x.bitwise_xor_(_shifted(x, 27)).mul_(_wrapped(MIX_2))
    return x.bitwise_xor_(_shifted(x, 31)).bitwise_or_(1)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifts right without copying the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _wrapped(number: int) -> int:
    return Sums(number).signed[0]
