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
from functools import cache
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
    """The two sums, from 0 to 2^64 - 1. Sums of parts add up to the sums of the whole."""

    first: int = 0
    second: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums((self.first + other.first) % MODULUS, (self.second + other.second) % MODULUS)

    def __str__(self) -> str:
        """Returns 32 hex digits, the form in the table of tensors."""
        return f"{self.first:016x}{self.second:016x}"

    @property
    def signed(self) -> tuple[int, int]:
        """Returns the same bits as signed numbers, because PyTorch and NCCL add int64 modulo 2^64."""
        return _signed(self.first), _signed(self.second)

    @classmethod
    def from_signed(cls, first: int, second: int) -> Sums:
        """Undoes `signed`."""
        return cls(first % MODULUS, second % MODULUS)


def _signed(number: int) -> int:
    if number >= MODULUS // 2:
        return number - MODULUS
    return number


def sums_of(data: npt.NDArray[np.uint8], first_word: int = 0) -> Sums:
    """Returns the sums of a contiguous array of bytes, uint8 [n]. Its first byte begins word `first_word` of the whole.
    Threads compute in parallel."""
    even = len(data) // WORD_BYTES * WORD_BYTES
    sums = sums_of_rows(data[:even].view("<u2")[None], first_word)
    if even < len(data):
        last = int(data[even])
        index = first_word + even // WORD_BYTES
        sums += Sums(*(last * key(index, k) % MODULUS for k in range(2)))
    return sums


def sums_of_rows(words: npt.NDArray[np.uint16], first_word: int = 0, step: int = 0) -> Sums:
    """Returns the sums of contiguous words, uint16 [rows, words]. Row r begins at word `first_word + r step` of the
    whole."""
    if not words.size:
        return Sums()
    first, second = _kernel()(words, np.uint64(first_word), np.uint64(step))
    return Sums(int(first), int(second))


def key(index: int, k: int) -> int:
    """Returns the factor of word `index` in sum `k`: from 1 to 2^64 - 1, odd."""
    z = (2 * index + k + GOLDEN) % MODULUS
    z = (z ^ (z >> 30)) * MIX_1 % MODULUS
    z = (z ^ (z >> 27)) * MIX_2 % MODULUS
    return (z ^ (z >> 31)) | 1


def warm_up() -> None:
    """Compiles the kernel, so that no update waits for it. Call it while a process starts."""
    _kernel()


@cache
def _kernel() -> Callable[..., tuple[np.uint64, np.uint64]]:
    """Compiles `_add_rows` for this CPU, for arrays that may be read-only and begin at any address."""
    from numba import njit, types  # an import of a quarter of a CPU second

    words = types.Array(types.uint16, 2, "C", readonly=True, aligned=False)
    signature = types.UniTuple(types.uint64, 2)(words, types.uint64, types.uint64)
    compiled: Any = njit(signature, nogil=True)(_add_rows)
    return compiled


_U = np.uint64  # numba makes a float of a uint64 and a plain number
_GOLDEN = _U(GOLDEN)
_MIX_1 = _U(MIX_1)
_MIX_2 = _U(MIX_2)
_1 = _U(1)
_2 = _U(2)
_27 = _U(27)
_30 = _U(30)
_31 = _U(31)


def _add_rows(words: Any, first_word: Any, step: Any) -> Any:
    """Computes `sums_of_rows`. LLVM vectorises the inner loop in this form; a function for the key would compute the
    same, but compile longer."""
    first = _U(0)
    second = _U(0)
    for r in range(words.shape[0]):
        row = words[r]
        start = _2 * (first_word + _U(r) * step) + _GOLDEN
        for i in range(row.shape[0]):
            word = _U(row[i])
            x = start + _2 * _U(i)
            z = (x ^ (x >> _30)) * _MIX_1
            z = (z ^ (z >> _27)) * _MIX_2
            first += word * ((z ^ (z >> _31)) | _1)
            x += _1
            z = (x ^ (x >> _30)) * _MIX_1
            z = (z ^ (z >> _27)) * _MIX_2
            second += word * ((z ^ (z >> _31)) | _1)
    return first, second
