"""Computes the sums of `trireme.core.digest` of many tensors by one kernel in Triton, on the device that holds them.

Each tensor becomes a job: its elements as rows in memory, each row a run of the innermost dimension after dimensions
are merged that are evenly spaced both in memory and in the whole. A program takes a tile of rows and columns, so it
divides once for a row and never for an element. Programs add their two sums to the job's row of the result by atomic
additions, which are exact modulo 2^64 in any order.

Jobs that need different code (`Variant`) are launched separately: a few launches, however many tensors.
The oracle of the tests has the same sums by tensor operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.core.digest import GOLDEN, MIX_1, MIX_2, WORD_BYTES
from trireme.transports.tensor_sums import TensorPart

TILE = 2048
"""Elements that a program sums at once."""
STEPS = 16
"""Tiles along its rows that a program sums one after the other, at most."""
WARPS = 4
COLUMNS = (32, 256, TILE)
"""Widths of tiles. Rows that are shorter than TILE are summed several at a time."""
MAX_OUTER = 4
"""Dimensions of a job around its rows; a tensor with more of them becomes several jobs."""
MAX_ROWS = 2**30
"""Rows of a job, which a program counts in 32 bits."""
ALIGNMENT = 16
"""Bytes that a thread loads at once, and the alignment that this needs."""
FIELDS = 11 + 3 * MAX_OUTER
"""Numbers of a job as the kernel reads it (`Job.fields`)."""

FEW_TILES = 64
"""Tiles of a tensor up to which none are saved: another variant would have to be compiled."""
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
    torch.float64: tl.float64,
}
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_GOLDEN = tl.constexpr(GOLDEN)
_TILE = tl.constexpr(TILE)
_STEPS = tl.constexpr(STEPS)
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_FIELDS = tl.constexpr(FIELDS)
_MAX_OUTER = tl.constexpr(MAX_OUTER)


Dimension = tuple[int, int, int]
"""Size, distance in memory, distance in the whole, in elements."""


class Variant(NamedTuple):
    """The properties by which the kernel is compiled: one launch sums all jobs with the same properties."""

    source: torch.dtype
    """The dtype that is loaded: an integer of the same size, unless elements are converted."""
    target: torch.dtype | None
    """The dtype that elements are converted to before they are summed; None: they are not."""
    words: int
    """Words of an element that is summed; 0: it is half a word."""
    contiguous: bool
    """True: rows are contiguous in memory and in the whole."""
    aligned: bool
    """True: each row begins at a multiple of ALIGNMENT bytes, and is a multiple of them long."""
    columns: int
    """Width of a tile."""


class Job(NamedTuple):
    """A part, or a piece of one, as the kernel walks through it. Sizes and distances count elements as they are
    loaded."""

    pointer: int
    first: int
    row: Dimension
    outer: tuple[Dimension, ...]
    """The dimensions around a row, the innermost first."""
    out: int
    """Row of the result for the first tensor."""
    tensors: int
    pace: int

    @property
    def rows(self) -> int:
        """The number of rows of one tensor."""
        return prod(size for size, _, _ in self.outer)

    def programs(self, columns: int) -> tuple[int, int]:
        """Returns how many Triton programs one tensor takes with tiles `columns` wide: (along a row, over all rows)."""
        return -(-self.row[0] // (columns * STEPS)), -(-self.rows // (TILE // columns))

    def fields(self, columns: int) -> list[int]:
        """Returns the job's row in the kernel's table: FIELDS numbers, for tiles `columns` wide."""
        wide, high = self.programs(columns)
        outer = [*self.outer, *[(1, 0, 0)] * (MAX_OUTER - len(self.outer))]
        numbers = [self.pointer, self.first, *self.row, self.pace, self.rows, wide, high, wide * high * self.tensors]
        return [*numbers, self.out, *(number for dimension in outer for number in dimension)]


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """Computes splitmix64(x - GOLDEN) | 1."""
    z = (x ^ (x >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return (z ^ (z >> 31)) | 1


@triton.jit
def _find_job(program: tl.tensor, ends: tl.tensor, count: tl.tensor, halvings: tl.tensor) -> tl.tensor:
    """Returns the number of the job that the program number `program` belongs to, by bisection of `ends`. `count` and
    `halvings`: see `sum_kernel`."""
    low = program * 0
    high = low + count - 1
    for _ in range(halvings):
        middle = (low + high) // 2
        beyond = program >= tl.load(ends + middle)
        low = tl.where(beyond, middle + 1, low)
        high = tl.where(beyond, high, middle)
    return low


@triton.jit
def _start_rows(job: tl.tensor, row: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Returns where the rows numbered `row` begin, relative to the first row of the job: their places in memory, and
    their places in the whole tensor, both int64."""
    at = row.to(tl.int64) * 0
    place = at
    for d in tl.static_range(_MAX_OUTER):
        size = tl.load(job + 11 + 3 * d).to(tl.int32)
        index = (row % size).to(tl.int64)
        row = row // size
        at += index * tl.load(job + 12 + 3 * d)
        place += index * tl.load(job + 13 + 3 * d)
    return at, place


@triton.jit
def _add(
    first: tl.tensor, second: tl.tensor, value: tl.tensor, element: tl.tensor, WORDS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the sums `first` and `second`, uint64, with the words of the elements `value` added. `element`: the
    elements' places in the whole tensor. `WORDS`: words of an element; 0: it is half a word."""
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
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Adds the sums of one program's tiles to `out`, int64 [rows, 2]. `jobs`: int64 [count, FIELDS]. `ends`: int32
    [count], for each job the number of programs of all jobs up to and including it. `halvings`: how often `count` is
    halved until one is left. Capitals: see `Variant`."""
    ROWS: tl.constexpr = _TILE // COLUMNS
    VECTOR: tl.constexpr = _ALIGNMENT * 8 // SOURCE.primitive_bitwidth
    program = tl.program_id(0)
    number = _find_job(program, ends, count, halvings)
    job = jobs + number.to(tl.int64) * _FIELDS
    tile = program - tl.load(ends + number) + tl.load(job + 9).to(tl.int32)
    wide = tl.load(job + 7).to(tl.int32)
    deep = tl.load(job + 8).to(tl.int32)
    start = (tile % wide).to(tl.int64) * (COLUMNS * _STEPS)
    member = (tile // wide // deep).to(tl.int64)
    row = tile // wide % deep * ROWS + tl.arange(0, ROWS)
    at, place = _start_rows(job, row)
    memory = tl.load(job + 3)
    whole = tl.load(job + 4)
    at += member * tl.load(job + 5) + start * memory
    place += tl.load(job + 1) + start * whole
    pointer = tl.load(job).to(tl.pointer_type(SOURCE))
    remaining = tl.minimum(tl.load(job + 2) - start, COLUMNS * _STEPS).to(tl.int32)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, _ALIGNMENT)
        at = tl.multiple_of(at, VECTOR)
        remaining = tl.multiple_of(remaining, VECTOR)
    exists = row < tl.load(job + 6).to(tl.int32)
    first = tl.zeros([ROWS, COLUMNS], tl.uint64)
    second = tl.zeros([ROWS, COLUMNS], tl.uint64)
    for step in range(tl.cdiv(remaining, COLUMNS)):
        column = step * COLUMNS + tl.arange(0, COLUMNS)
        inside = exists[:, None] & (column < remaining)[None, :]
        if CONTIGUOUS:
            value = tl.load(pointer + at[:, None] + column[None, :], mask=inside, other=0)
            element = place[:, None] + column[None, :]
        else:
            value = tl.load(pointer + (at[:, None] + (column * memory)[None, :]), mask=inside, other=0)
            element = place[:, None] + (column * whole)[None, :]
        if TARGET is not None:
            value = value.to(TARGET)
        first, second = _add(first, second, value, element, WORDS)
    target = out + (tl.load(job + 10) + member) * 2
    tl.atomic_add(target, tl.sum(tl.sum(first, 1), 0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(target + 1, tl.sum(tl.sum(second, 1), 0).to(tl.int64, bitcast=True), sem="relaxed")


def device_sums(parts: Sequence[TensorPart]) -> Tensor:
    """Returns the sums of all tensors of `parts`, in order: int64 [tensors, 2] on the device of the tensors. Does not
    wait for the device: the tensors' memory must not be written until the present work of the current stream is
    done."""
    device = parts[0].tensor.device
    total = torch.zeros(sum(part.tensors for part in parts), 2, dtype=torch.int64, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        ready = [one for part in parts for one in _converted(part)]  # alive until all is launched
        for variant, jobs in jobs_by_variant(ready).items():
            table, ends = tables(variant, jobs)
            programs = int(ends[-1])
            sum_kernel[(programs,)](
                table.to(device),
                ends.to(device),
                total,
                len(jobs),
                (len(jobs) - 1).bit_length(),
                **constants(variant),
                num_warps=WARPS,
            )
    return total


def jobs_by_variant(parts: Sequence[TensorPart]) -> dict[Variant, list[Job]]:
    """Returns the jobs of all parts by variant; the jobs of a variant share one launch."""
    by_variant: defaultdict[Variant, list[Job]] = defaultdict(list)
    row = 0
    for part in parts:
        if part.tensor.numel():
            variant, jobs = _jobs_of(part, row)
            by_variant[variant] += jobs
        row += part.tensors
    return dict(by_variant)


def tables(variant: Variant, jobs: Sequence[Job]) -> tuple[Tensor, Tensor]:
    """Returns the kernel's tables of `jobs`: their fields, int64 [jobs, FIELDS], and for each job the number of
    programs of all jobs up to and including it, int32 [jobs]."""
    table = torch.tensor([job.fields(variant.columns) for job in jobs])
    return table, table[:, 9].cumsum(0).to(torch.int32)


def constants(variant: Variant) -> dict[str, object]:
    """Returns the compile-time arguments of the kernel for a variant."""
    return {
        "SOURCE": _TYPES[variant.source],
        "TARGET": None if variant.target is None else _TYPES[variant.target],
        "WORDS": variant.words,
        "CONTIGUOUS": variant.contiguous,
        "ALIGNED": variant.aligned,
        "COLUMNS": variant.columns,
    }


def _converted(part: TensorPart) -> Iterator[TensorPart]:
    """Yields the part unchanged if the kernel can convert its elements as PyTorch does, or need not. Else yields a part
    for each tensor, converted by PyTorch."""
    tensor = part.tensor
    if tensor.dtype == part.dtype or {tensor.dtype, part.dtype} <= CONVERTED:
        yield part
        return
    for member in range(part.tensors):
        at = tensor.storage_offset() + member * part.pace
        one = tensor.as_strided(tensor.shape, tensor.stride(), at).to(part.dtype)
        yield TensorPart(one, part.first, part.strides, part.dtype)


def _jobs_of(part: TensorPart, out: int) -> tuple[Variant, list[Job]]:
    """Returns the variant and the jobs of a part. `out`: the row of the result for the part's first tensor."""
    tensor = part.tensor
    first = part.first
    pace = part.pace
    dimensions = list(zip(tensor.shape, tensor.stride(), part.strides, strict=True))
    item = tensor.element_size()
    if item == 16:  # complex128: two numbers of 8 bytes
        item = 8
        first = 2 * first
        pace = 2 * pace
        dimensions = [*((size, 2 * memory, 2 * whole) for size, memory, whole in dimensions), (2, 1, 1)]
    inner, *outer = _merged(dimensions)
    pointer = tensor.data_ptr()
    converts = tensor.dtype != part.dtype
    halves = [pointer, first, pace, inner[0], *(number for dimension in outer for number in dimension[1:])]
    if item == 1 and inner[1:] == (1, 1) and not any(number % WORD_BYTES for number in halves):
        item = WORD_BYTES
        first = first // 2
        pace = pace // 2
        inner = (inner[0] // 2, 1, 1)
        outer = [(size, memory // 2, whole // 2) for size, memory, whole in outer]
    steps = [pointer, *(item * number for number in (pace, inner[0], *(memory for _, memory, _ in outer)))]
    contiguous = inner[1:] == (1, 1)
    job = Job(pointer, first, inner, tuple(outer), out, part.tensors, pace)
    variant = Variant(
        source=tensor.dtype if converts else _INTEGERS[item],
        target=part.dtype if converts else None,
        words=(part.dtype.itemsize if converts else item) // WORD_BYTES,
        contiguous=contiguous,
        aligned=contiguous and not any(step % ALIGNMENT for step in steps),
        columns=_columns(job),
    )
    return variant, list(_cut(job, item))


def _merged(dimensions: Iterable[Dimension]) -> list[Dimension]:
    """Returns dimensions (size, distance in memory, distance in the whole) that reach the same elements as
    `dimensions`, as few as possible but at least one; the dimension with the smallest distance in memory comes
    first."""
    merged: list[Dimension] = []
    for size, memory, whole in sorted(
        (dimension for dimension in dimensions if dimension[0] > 1), key=lambda dimension: dimension[1:]
    ):
        if merged:
            inner_size, inner_memory, inner_whole = merged[-1]
            if (memory, whole) == (inner_size * inner_memory, inner_size * inner_whole):
                merged[-1] = (inner_size * size, inner_memory, inner_whole)
                continue
        merged.append((size, memory, whole))
    return merged or [(1, 1, 1)]


def _columns(job: Job) -> int:
    """Returns the width of a job's tiles: the largest of COLUMNS with at most a quarter more tiles than the best width
    needs, or with at most FEW_TILES tiles."""
    tiles = {columns: -(-job.row[0] // columns) * -(-job.rows // (TILE // columns)) for columns in COLUMNS}
    enough = max(FEW_TILES, min(tiles.values()) * 5 // 4)
    return max(columns for columns in COLUMNS if tiles[columns] <= enough)


def _cut(job: Job, item: int) -> Iterator[Job]:
    """Yields the job, or jobs for its pieces if it has too many dimensions or rows for the kernel. `item`: bytes of an
    element."""
    if len(job.outer) <= MAX_OUTER and job.rows <= MAX_ROWS:
        yield job
        return
    size, memory, whole = job.outer[-1]
    for member in range(job.tensors):
        for at in range(size):
            pointer = job.pointer + item * (member * job.pace + at * memory)
            rest = job._replace(pointer=pointer, first=job.first + at * whole, outer=job.outer[:-1])
            yield from _cut(rest._replace(out=job.out + member, tensors=1, pace=0), item)
