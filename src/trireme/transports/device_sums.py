"""Computes the checksums (`trireme.core.digest.Sums`) of many tensors by one Triton kernel, on the tensors' device.

Each `TensorPart` becomes a job. Dimensions that are evenly spaced both in memory and in the whole tensor are merged
(`merged`). The elements along the innermost dimension that remains are a row. A program takes a piece of one row, so it
divides a few times and never for an element. Programs add their two sums to the tensor's row of the result by atomic
additions, which are exact modulo 2^64 in any order.

Jobs that need different code (`Variant`) are launched separately: a few launches, however many tensors. If the kernel
cannot process a part (more dimensions, other dtypes), the CPU computes its checksums; no published model has such a
part. Tests compare the kernel with an oracle that computes the same checksums by tensor operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.core.digest import GOLDEN, MIX_1, MIX_2, WORD_BYTES
from trireme.transports.tensor_sums import TensorPart, host_sums, merged

WIDE = 2048
NARROW = 256
"""Elements that a program sums at once: NARROW if a tensor has more than FEW_ROWS rows and they are shorter than WIDE,
else WIDE."""
FEW_ROWS = 64
STEPS = 16
"""Most pieces, each of WIDE or NARROW elements, that one program sums along its row."""
WARPS = 4
ALIGNMENT = 16
"""Bytes that a thread loads at once, and the alignment that this needs."""
MAX_OUTER = 4
"""Most dimensions of a job, in addition to the one along its rows, that the kernel can handle."""
FIELDS = 10 + 3 * MAX_OUTER
"""Length of the list of numbers that describes a job to the kernel (`_job`)."""
PROGRAMS = 8
"""Index, in the numbers that describe a job, of the number of programs that sum the job."""
CONVERTED = {torch.float32, torch.float16, torch.bfloat16}
"""Dtypes between which the kernel converts, exactly as PyTorch does."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TYPES = {
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_GOLDEN = tl.constexpr(GOLDEN)
_STEPS = tl.constexpr(STEPS)
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_FIELDS = tl.constexpr(FIELDS)
_MAX_OUTER = tl.constexpr(MAX_OUTER)


class Variant(NamedTuple):
    """The properties of a job that are compile-time constants of the kernel. One launch computes the checksums of all
    jobs with equal properties."""

    source: torch.dtype
    """The dtype that is loaded: an integer of the same size, unless elements are converted."""
    target: torch.dtype | None
    """The dtype that elements are converted to before they are summed; None: elements are not converted."""
    words: int
    """16-bit words of an element that is summed; 0: an element is half a word."""
    contiguous: bool
    """True: rows are contiguous in memory and in the whole tensor, begin at multiples of ALIGNMENT bytes, and have a
    length that is a multiple of ALIGNMENT bytes."""
    columns: int
    """Elements that a program sums at once."""


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """Computes splitmix64(x - GOLDEN) | 1."""
    z = (x ^ (x >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return (z ^ (z >> 31)) | 1


@triton.jit
def _find_job(program: tl.tensor, ends: tl.tensor, count: tl.tensor, halvings: tl.tensor) -> tl.tensor:
    """Returns the number of the job to which program number `program` belongs, by bisection of `ends`, int32 [count].
    `ends[i]`: the number of programs of the jobs 0 to i together. `halvings`: how often `count` is halved until one is
    left."""
    low = program * 0
    high = low + count - 1
    for _ in range(halvings):
        middle = (low + high) // 2
        beyond = program >= tl.load(ends + middle)
        low = tl.where(beyond, middle + 1, low)
        high = tl.where(beyond, high, middle)
    return low


@triton.jit
def _add(
    first: tl.tensor, second: tl.tensor, value: tl.tensor, element: tl.tensor, WORDS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Adds the contributions of the elements `value` to `first` and `second`, uint64: a tensor's two checksums so far.
    Returns the new values. `element`: the elements' places in the whole tensor. `WORDS`: 16-bit words of an element; 0:
    an element is half a word."""
    if WORDS == 0:
        half = value.to(tl.uint8, bitcast=True).to(tl.uint64)
        word = half << ((element & 1) * 8).to(tl.uint64)
        x = ((element >> 1) * 2).to(tl.uint64) + _GOLDEN
        first += word * _key(x)
        second += word * _key(x + 1)
    else:
        x = (element * (2 * WORDS)).to(tl.uint64) + _GOLDEN
        if WORDS == 1:
            bits = value.to(tl.uint16, bitcast=True)
        elif WORDS == 2:
            bits = value.to(tl.uint32, bitcast=True)
        else:
            bits = value.to(tl.uint64, bitcast=True)
        for w in tl.static_range(WORDS):
            word = ((bits >> (16 * w)) & 0xFFFF).to(tl.uint64)
            first += word * _key(x + 2 * w)
            second += word * _key(x + (2 * w + 1))
    return first, second


@triton.jit(do_not_specialize=["count", "halvings"])
def sum_kernel(
    jobs: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    halvings: tl.tensor,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    WORDS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Computes the two checksums (`Sums`) of one piece of a tensor, and adds them to the tensor's row of `out`, int64
    [tensors, 2]. The program's number selects the tensor and the piece. `jobs`: int64 [count, FIELDS], from `_job`.
    `ends`, int32 [count], and `halvings`: as in `_find_job`. The arguments in capitals are the fields of `Variant` with
    these names."""
    program = tl.program_id(0)
    number = _find_job(program, ends, count, halvings)
    job = jobs + number.to(tl.int64) * _FIELDS
    piece = program - tl.load(ends + number) + tl.load(job + 8).to(tl.int32)
    rows = tl.load(job + 6).to(tl.int32)
    pieces = tl.load(job + 7).to(tl.int32)
    row = piece // pieces % rows
    member = (piece // pieces // rows).to(tl.int64)
    start = (piece % pieces).to(tl.int64) * (COLUMNS * _STEPS)
    memory = tl.load(job + 3)
    whole = tl.load(job + 4)
    at = member * tl.load(job + 5) + start * memory
    place = tl.load(job + 1) + start * whole
    for d in tl.static_range(_MAX_OUTER):
        size = tl.load(job + 10 + 3 * d).to(tl.int32)
        index = (row % size).to(tl.int64)
        row = row // size
        at += index * tl.load(job + 11 + 3 * d)
        place += index * tl.load(job + 12 + 3 * d)
    pointer = tl.load(job).to(tl.pointer_type(SOURCE))
    remaining = tl.minimum(tl.load(job + 2) - start, COLUMNS * _STEPS).to(tl.int32)
    if CONTIGUOUS:
        VECTOR: tl.constexpr = _ALIGNMENT * 8 // SOURCE.primitive_bitwidth
        pointer = tl.multiple_of(pointer, _ALIGNMENT)
        at = tl.multiple_of(at, VECTOR)
        remaining = tl.multiple_of(remaining, VECTOR)
    first = tl.zeros([COLUMNS], tl.uint64)
    second = tl.zeros([COLUMNS], tl.uint64)
    for step in range(tl.cdiv(remaining, COLUMNS)):
        column = step * COLUMNS + tl.arange(0, COLUMNS)
        if CONTIGUOUS:
            value = tl.load(pointer + at + column, mask=column < remaining, other=0)
            element = place + column
        else:
            value = tl.load(pointer + at + column * memory, mask=column < remaining, other=0)
            element = place + column * whole
        if TARGET is not None:
            value = value.to(TARGET)
        first, second = _add(first, second, value, element, WORDS)
    target = out + (tl.load(job + 9) + member) * 2
    tl.atomic_add(target, tl.sum(first, 0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(target + 1, tl.sum(second, 0).to(tl.int64, bitcast=True), sem="relaxed")


def device_sums(parts: Sequence[TensorPart]) -> Tensor:
    """Returns the two checksums (`Sums.signed`) of each tensor of `parts`, in order: int64 [tensors, 2] on the device
    of the tensors. Does not wait for the device: do not write to the tensors' memory until the work now queued in the
    current stream is done."""
    device = parts[0].tensor.device
    total = torch.zeros(sum(part.tensors for part in parts), 2, dtype=torch.int64, device=device)
    by_variant, host_parts = jobs_of(parts)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for variant, jobs in by_variant.items():
            table = torch.tensor(jobs)
            ends = table[:, PROGRAMS].cumsum(0).to(torch.int32)
            sum_kernel[(int(ends[-1]),)](
                table.to(device),
                ends.to(device),
                total,
                len(jobs),
                (len(jobs) - 1).bit_length(),
                **constants(variant),
                num_warps=WARPS,
            )
    for row, part in host_parts.items():
        total[row : row + part.tensors] = torch.tensor(list(host_sums(part)), device=device)
    return total


def jobs_of(parts: Sequence[TensorPart]) -> tuple[dict[Variant, list[list[int]]], dict[int, TensorPart]]:
    """Returns {variant: its jobs, each a list of FIELDS numbers} for the parts that the kernel can process, and {row:
    part} for the other parts. `row` is the row of the result for the part's first tensor."""
    by_variant: defaultdict[Variant, list[list[int]]] = defaultdict(list)
    host_parts = {}
    row = 0
    for part in parts:
        dtypes = {part.tensor.dtype, part.dtype}
        dimensions = merged(zip(part.tensor.shape, part.tensor.stride(), part.strides, strict=True))
        if len(dimensions) > MAX_OUTER + 1 or part.dtype.itemsize > 8 or not (len(dtypes) == 1 or dtypes <= CONVERTED):
            host_parts[row] = part
        elif part.tensor.numel():
            variant, job = _job(part, dimensions, row)
            by_variant[variant].append(job)
        row += part.tensors
    return dict(by_variant), host_parts


def constants(variant: Variant) -> dict[str, object]:
    """Returns the compile-time arguments of the kernel for a variant."""
    return {
        "SOURCE": _TYPES[variant.source],
        "TARGET": None if variant.target is None else _TYPES[variant.target],
        "WORDS": variant.words,
        "CONTIGUOUS": variant.contiguous,
        "COLUMNS": variant.columns,
    }


def _job(part: TensorPart, dimensions: Sequence[tuple[int, int, int]], out: int) -> tuple[Variant, list[int]]:
    """Returns the variant of a part's job and the FIELDS numbers that describe the job to the kernel. `dimensions`,
    from `merged`: for each dimension (size, stride in memory, stride in the whole tensor), in elements. `out`: the row
    of the result for the part's first tensor."""
    inner, *outer = dimensions
    rows = prod(size for size, _, _ in outer)
    converts = part.tensor.dtype != part.dtype
    lengths = (inner[0], part.pace, *(memory for _, memory, _ in outer))
    steps = [part.tensor.data_ptr(), *(part.tensor.element_size() * length for length in lengths)]
    variant = Variant(
        source=part.tensor.dtype if converts else _INTEGERS[part.dtype.itemsize],
        target=part.dtype if converts else None,
        words=part.dtype.itemsize // WORD_BYTES,
        contiguous=inner[1:] == (1, 1) and not any(step % ALIGNMENT for step in steps),
        columns=NARROW if rows > FEW_ROWS and inner[0] < WIDE else WIDE,
    )
    pieces = -(-inner[0] // (variant.columns * STEPS))
    numbers = [part.tensor.data_ptr(), part.first, *inner, part.pace, rows, pieces, pieces * rows * part.tensors, out]
    around = [*outer, *[(1, 0, 0)] * (MAX_OUTER - len(outer))]
    return variant, [*numbers, *(number for dimension in around for number in dimension)]
