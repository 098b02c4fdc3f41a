"""Computes digests of tensors. The digests of a tensor's parts add up to the digest of the whole tensor.

A tensor is a sequence of 16-bit little-endian words w_i, unsigned, in C order; an odd last byte has a zero after it.
Its digest is two sums modulo 2^64, for k = 0 and 1:

    sum over i of w_i key_k(i),    key_k(i) = splitmix64(2 i + k) | 1

A shard of the trainer and a rank of an engine each have a part of a tensor. They sum it with the keys of the words'
places in the whole tensor, and no process needs all of it. A changed word changes both sums, because keys are odd. Two
words that change places change at least one sum, except with a probability of 2^-96. The sums find accidents. They do
not resist someone who wants to forge weights, because they are linear.

The kernel is compiled by numba when it is first needed (`warm_up`), which takes half a CPU second in each process.
numba's cache on disk would halve that, and is not used: it writes next to the source, and processes on unlike CPUs that
share an installation could take each other's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

SCHEME = "sum64x2"
"""Names this formula. It is part of the digest of a version (`trireme.core.weights.weights_digest`)."""
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
"""The constants of splitmix64. Source: https://prng.di.unimi.it/splitmix64.c"""
MODULUS = 1 << 64
WORD_BYTES = 2


@dataclass(frozen=True)
class Sums:
    """The digest of a tensor, or of a part of a tensor: two weighted sums of its 16-bit words (see the module), each
    from 0 to 2^64 - 1. The sums of all parts, added modulo 2^64, are the sums of the tensor."""

    first: int = 0
    second: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums((self.first + other.first) % MODULUS, (self.second + other.second) % MODULUS)

    def __str__(self) -> str:
        """Returns both sums as 32 hex digits, the form of a tensor's hash (`trireme.core.weights.TensorEntry`)."""
        return f"{self.first:016x}{self.second:016x}"

    @classmethod
    def parse(cls, text: str) -> Sums:
        """Parses the 32 hex digits that `str(sums)` returned, and returns the sums."""
        return cls(int(text[:16], 16), int(text[16:], 16))

    @property
    def signed(self) -> tuple[int, int]:
        """Returns both sums as signed 64-bit numbers with the same bits, because PyTorch and NCCL add int64 modulo
        2^64."""
        return _signed(self.first), _signed(self.second)

    @classmethod
    def from_signed(cls, first: int, second: int) -> Sums:
        """Returns the sums for the two numbers that `signed` returned."""
        return cls(first % MODULUS, second % MODULUS)


def _signed(number: int) -> int:
    if number >= MODULUS // 2:
        return number - MODULUS
    return number


def sums_of(data: npt.NDArray[np.uint8], first_word: int = 0) -> Sums:
    """Returns the sums of a part of a tensor. `data`: the contiguous bytes of the part, uint8 [n], which begin at the
    16-bit word with index `first_word` of the whole tensor. Releases the GIL, so that several threads can compute sums
    at the same time."""
    even = len(data) // WORD_BYTES * WORD_BYTES
    sums = sums_of_rows(data[:even].view("<u2")[None], first_word)
    if even < len(data):
        last = int(data[even])
        index = first_word + even // WORD_BYTES
        sums += Sums(*(last * key(index, k) % MODULUS for k in range(2)))
    return sums


def sums_of_rows(words: npt.NDArray[np.uint16], first_word: int, step: int = 0) -> Sums:
    """Returns the sums of a part of a tensor: one Sums for all rows of the part. `words`: the part, uint16 [rows, words
    in a row], contiguous in memory. In the whole tensor, row r begins at word `first_word + r * step`, and the words of
    a row follow each other."""
    if not words.size:
        return Sums()
    first, second = _kernel()(words, np.uint64(first_word), np.uint64(step))
    return Sums(int(first), int(second))


def key(index: int, k: int) -> int:
    """Returns the factor of word `index` in sum `k` (0 or 1), which the module's docstring calls key_k(i). The factor
    is odd, from 1 to 2^64 - 1."""
    with np.errstate(over="ignore"):
        return int(key_of(np.uint64((2 * index + k + GOLDEN) % MODULUS)))


def key_of(x: Any) -> Any:
    """Computes the factor of a word in a sum, as `key` does. Works on NumPy values, and in kernels that `compiler`
    compiles. `x`, a uint64, is 2 * index + k + GOLDEN modulo 2^64: the caller adds GOLDEN, which is the first step of
    splitmix64. Returns splitmix64(2 * index + k) | 1, a uint64."""
    z = (x ^ (x >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return (z ^ (z >> 31)) | np.uint64(1)


@cache
def compiler() -> Callable[..., Any]:
    """Returns numba's `njit` with `nogil=True`: kernels that it compiles release the GIL. They can call `key_of`."""
    from numba import njit  # an import of a quarter of a CPU second
    from numba.extending import register_jitable

    register_jitable(key_of)
    return partial(njit, nogil=True)


def warm_up() -> None:
    """Compiles the kernel, so that no update waits for it. Call it while a process starts."""
    _kernel()


@cache
def _kernel() -> Callable[..., tuple[np.uint64, np.uint64]]:
    """Compiles `_add_rows` for this CPU and returns the compiled function. The function takes arrays that may be
    read-only and begin at any address."""
    from numba import types

    words = types.Array(types.uint16, 2, "C", readonly=True, aligned=False)
    signature = types.UniTuple(types.uint64, 2)(words, types.uint64, types.uint64)
    compiled: Any = compiler()(signature)(_add_rows)
    return compiled


_U = np.uint64  # numba makes an int64 of a uint64 and a plain number, unless that shifts it or is above 2^63


def _add_rows(words: Any, first_word: Any, step: Any) -> Any:
    """Computes both sums of `sums_of_rows`. In this form LLVM vectorises the inner loop."""
    first = _U(0)
    second = _U(0)
    for r in range(words.shape[0]):
        row = words[r]
        start = _U(2) * (first_word + _U(r) * step) + GOLDEN
        for i in range(row.shape[0]):
            word = _U(row[i])
            x = start + _U(2) * _U(i)
            first += word * key_of(x)
            second += word * key_of(x + _U(1))
    return first, second
