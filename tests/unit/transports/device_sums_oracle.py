"""Compares the kernel of device sums with the oracle on random tensors. Run it in a process of its own: with a GPU, or
with TRITON_INTERPRET=1, where Triton computes a program by numpy.

    python device_sums_oracle.py cpu|cuda [SEED]
"""

import mmap
import random
import sys

import torch
from torch import Tensor

from trireme.core.digest import GOLDEN, MIX_1, MIX_2, WORD_BYTES, Sums
from trireme.transports.device_sums import device_sums
from trireme.transports.tensor_sums import TensorPart, c_strides, rectangle

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
ONE_OF_A_SIZE = (torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.complex128)
SHAPES = (
    *((), (7,), (2049,), (3, 5), (130, 257), (0, 4)),
    *((2, 3, 4, 5, 6, 7), (40, 2, 33), (70_001,), (9, 4096)),
)
CONVERTED = (
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.bfloat16),
)
SPARSE_BYTES = 20 << 30
MAP_NORESERVE = 0x4000  # of Linux: memory is taken when it is touched


def make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Returns a tensor of random bits (of random numbers, where bits are no booleans)."""
    if dtype == torch.bool:
        return torch.rand(shape, device=device) < 0.5
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, device=device)
    return raw.view(dtype).reshape(shape) if shape else raw.view(dtype)[0]


def numbers(shape: tuple[int, ...], source: torch.dtype, device: str) -> Tensor:
    """Returns numbers to convert, with infinities and zeros of both signs. Triton's interpreter does not round to
    bfloat16 and does not know subnormal ones; on a GPU there are all sizes and NaN."""
    values = torch.randn(shape, dtype=torch.float64, device=device)
    values.view(-1)[::7] = float("inf")
    values.view(-1)[1::7] = -0.0
    if device == "cpu":
        return values.to(torch.bfloat16).to(source)
    values *= 10.0 ** torch.randint(-42, 40, shape, device=device)
    values.view(-1)[2::7] = float("nan")
    return values.to(source)


def cases(device: str) -> list[tuple[str, TensorPart]]:
    parts = []
    for dtype in DTYPES:
        for shape in SHAPES if device == "cuda" else random.sample(SHAPES, 2):  # the interpreter is slow
            first = random.choice([0, 1, 6, 2**31 + 5, 2**33, 2**45 + 3])
            parts.append(
                (f"{dtype} {shape} at {first}", TensorPart(make(shape, dtype, device), first, c_strides(shape), dtype))
            )
        if device == "cpu" and dtype not in ONE_OF_A_SIZE:
            continue  # the kernel sees integers of the same size
        whole = make((64, 96), dtype, device)
        parts.append((f"{dtype} transposed", TensorPart(whole.T, 3, c_strides((96, 64)), dtype)))
        part, (first, strides) = whole[10:50, 32:64], rectangle((64, 96), (10, 32))
        parts.append((f"{dtype} rectangle", TensorPart(part, first, strides, dtype)))
        parts.append((f"{dtype} every other", TensorPart(whole[::2, 1::3], 0, c_strides((32, 32)), dtype)))
        parts.append((f"{dtype} shifted", TensorPart(whole.reshape(-1)[1:5000], 0, (1,), dtype)))
        parts.append((f"{dtype} repeated", TensorPart(whole[0].expand(5, 96), 7, (96, 1), dtype)))
        stack = make((6, 20, 48), dtype, device)
        parts.append((f"{dtype} stack", TensorPart(stack[0], 11, (48, 1), dtype, 6, 20 * 48)))
        parts.append((f"{dtype} stack of rows", TensorPart(stack[1][4:9, :16], 0, (16, 1), dtype, 4, 20 * 48)))
    for source, target in CONVERTED:
        for shape in ((5,), (4096,), (33, 70), (3, 2048)):
            parts.append(
                (
                    f"{source} as {target} {shape}",
                    TensorPart(numbers(shape, source, device), 9, c_strides(shape), target),
                )
            )
        stack = numbers((4, 64, 32), source, device)
        parts.append((f"{source} as {target} stack", TensorPart(stack[0, 8:24], 5, (32, 1), target, 4, 64 * 32)))
    return parts


def far(device: str) -> list[tuple[str, TensorPart]]:
    """Returns parts whose elements are more than 2^31 elements and words apart in memory; few pages are touched."""
    if device == "cpu":
        memory = mmap.mmap(-1, SPARSE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        raw = torch.frombuffer(memory, dtype=torch.int16)
    else:
        raw = torch.empty(SPARSE_BYTES // 2, dtype=torch.int16, device=device)
    pace = 2**32 + 48
    two = raw.as_strided((2, 300), (pace, 1))
    two.copy_(make((2, 300), torch.int16, device))
    column = raw.as_strided((3, 5), (7, 2**31 + 16))
    column.copy_(make((3, 5), torch.int16, device))
    return [
        ("rows far apart", TensorPart(two, 0, (2**40, 1), torch.int16)),
        ("tensors far apart", TensorPart(two[0], 2**50, (1,), torch.int16, 2, pace)),
        ("columns far apart", TensorPart(column, 2**31 - 2, (5, 1), torch.int16)),
    ]


def operation_sums(part: TensorPart) -> Tensor:
    """Returns the sums of the tensors of a part, int64 [tensors, 2] on their device, by tensor operations."""
    tensor, item = part.tensor, part.dtype.itemsize
    places = torch.full((1,), part.first, dtype=torch.int64, device=tensor.device)
    for size, stride in zip(tensor.shape, part.strides, strict=True):
        steps = torch.arange(size, dtype=torch.int64, device=tensor.device).mul_(stride)
        places = (places[:, None] + steps).reshape(-1)
    sums = []
    for number in range(part.tensors):
        start = tensor.storage_offset() + number * part.pace
        one = tensor.as_strided(tensor.shape, tensor.stride(), start).to(part.dtype).contiguous()
        flat = one.as_strided((one.numel(),), (1,))  # of dimensions of size 1 the strides say nothing
        if item == 1:  # the bytes at odd places are the upper halves of words
            at, words = places // WORD_BYTES, flat.view(torch.uint8).to(torch.int64) << (places % WORD_BYTES * 8)
        else:
            within = torch.arange(item // WORD_BYTES, device=tensor.device)
            at = (places[:, None] * len(within) + within).reshape(-1)
            words = flat.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
        sums.append(torch.stack([(keys(2 * at + k) * words).sum() for k in range(2)]))
    return torch.stack(sums)


def keys(x: Tensor) -> Tensor:
    """Computes splitmix64(x) | 1: int64 arithmetic wraps around."""
    z = x + Sums(GOLDEN).signed[0]
    z = (z ^ shifted(z, 30)) * Sums(MIX_1).signed[0]
    z = (z ^ shifted(z, 27)) * Sums(MIX_2).signed[0]
    return (z ^ shifted(z, 31)) | 1


def shifted(x: Tensor, bits: int) -> Tensor:
    """Shifts right without copying the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def main() -> None:
    device, seed = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    random.seed(seed)
    torch.manual_seed(seed)
    named = [*cases(device), *far(device)]
    random.shuffle(named)
    sums = device_sums([part for _, part in named]).cpu()
    wrong, row = [], 0
    for name, part in named:
        if not torch.equal(sums[row : row + part.tensors], operation_sums(part).cpu()):
            wrong.append(name)
        row += part.tensors
    assert not wrong, f"{len(wrong)} of {len(named)} differ: {wrong}"
    print(f"{len(named)} parts are equal")


if __name__ == "__main__":
    main()
