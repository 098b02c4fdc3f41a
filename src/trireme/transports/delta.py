"""Encodes the changes of a bucket of weights between two versions, and applies them to the older bucket.

A bucket is read as a sequence of 16-bit words, whatever the dtypes of its tensors. Words are compared as integers, so
NaN and -0.0 need no special treatment. Training with a small learning rate changes few words of weights in 16 bits, and
most of them by one unit in the last place. The changes are encoded as tokens, in the order of the words, and are not
compressed further. Where 1 % of the words changed, a token has 10 bits on average; its entropy is 9 bits.

    token   the number 4 * gap + kind, seven bits in a byte from the lowest on; the eighth bit says that more follow
    gap     words between this changed word and the changed word before it
    kind    0: the word grew by one; 1: it fell by one; 2: two bytes follow, its new value (little-endian)

`apply` also returns what the changes add to the sums of `trireme.core.digest`, so unchanged words are not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.core.digest import GOLDEN, WORD_BYTES, Sums, compiler, key_of
from trireme.core.errors import WeightsRefused

Bytes = npt.NDArray[np.uint8]
LARGEST_SHARE = 0.5
"""Changes of more than this share of a bucket's bytes are not worth their time: the bucket travels whole."""
BLOCK_TOKENS_BYTES = 4 * 12
"""Most bytes that the tokens of one block of four words can have."""


def encode(base: Bytes, bucket: Bytes) -> Bytes | None:
    """Returns the changes that turn `base` into `bucket`, as uint8 [n]. Both are contiguous uint8 arrays of the same
    size, a multiple of 8 bytes, because words are compared in blocks of four. Returns None if the changes have more
    than LARGEST_SHARE of the bucket's bytes. Releases the GIL."""
    changes = np.empty(int(len(bucket) * LARGEST_SHARE) + BLOCK_TOKENS_BYTES, np.uint8)
    size = _kernels()[0](base.view(np.uint64), bucket.view(np.uint64), changes)
    if size < 0:
        return None
    return changes[:size].copy()


class ChangesEncoder:
    """Encodes the buckets of each version as their changes since the version before. Keeps a copy of that version."""

    def __init__(self) -> None:
        self._before: dict[int, Bytes] = {}

    def encode(self, number: int, bucket: Bytes) -> Bytes | None:
        """Returns the changes of bucket `number` since the last call for this number, and copies `bucket`, its bytes in
        the present version. Returns None if there was no such call, or if the changes are not much smaller than the
        bucket."""
        before = self._before.get(number)
        if before is None:
            self._before[number] = bucket.copy()
            return None
        changes = encode(before, bucket)
        before[:] = bucket
        return changes


def apply(changes: Bytes, bucket: Bytes, offsets: Sequence[int]) -> list[Sums]:
    """Applies `changes` to `bucket`, a contiguous writable uint8 array, which holds the bytes of the base. `offsets`:
    where the tensors begin in the bucket, in bytes, ascending. Returns, for each tensor, what must be added to its
    checksums. Releases the GIL. Raises WeightsRefused if the changes do not fit the bucket; part of them may have been
    applied."""
    added = np.zeros((len(offsets), 2), np.uint64)
    starts = np.asarray(offsets, np.int64) // WORD_BYTES
    if not _kernels()[1](changes, bucket.view(np.uint16), starts, added):
        raise WeightsRefused(
            f"the delta was corrupted on the way: its {len(changes)} bytes cannot be applied to a part of "
            f"{len(bucket)} bytes of the base weights"
        )
    return [Sums(int(first), int(second)) for first, second in added]


def warm_up() -> None:
    """Compiles the kernels, so that no update waits for the compilation. Call this function while a process starts."""
    _kernels()


@cache
def _kernels() -> tuple[Callable[..., int], Callable[..., bool]]:
    """Compiles `_encode` and `_apply` for this CPU and returns them. They take arrays that may be read-only and begin
    at any address."""
    from numba import types

    def array(of: Any, dimensions: int = 1, *, readonly: bool = False) -> Any:
        return types.Array(of, dimensions, "C", readonly=readonly, aligned=False)

    blocks = array(types.uint64, readonly=True)
    encoding = types.int64(blocks, blocks, array(types.uint8))
    sums = array(types.uint64, 2)
    changes = array(types.uint8, readonly=True)
    applying = types.boolean(changes, array(types.uint16), array(types.int64), sums)
    return compiler()(encoding)(_encode), compiler()(applying)(_apply)


_U = np.uint64  # as in `trireme.core.digest`
_WORD = _U(0xFFFF)


def _encode(base: Any, bucket: Any, changes: Any) -> Any:
    """Compares `base` and `bucket`, both uint64 [blocks], and writes the changes to `changes`, uint8, in the format of
    this module. Returns the number of bytes written, or -1 if `changes` is too small."""
    limit = changes.shape[0] - BLOCK_TOKENS_BYTES
    size = 0
    expected = 0  # the word after the last one that changed
    for i in range(bucket.shape[0]):
        if base[i] == bucket[i]:
            continue
        if size > limit:
            return -1
        old = base[i]
        new = bucket[i]
        for word in range(4 * i, 4 * i + 4):
            difference = (new - old) & _WORD
            if difference:
                # Written without branches, which a CPU would often guess wrong: signs and lengths are random.
                kind = 2 - 2 * (difference == _U(1)) - (difference == _WORD)
                token = 4 * (word - expected) + kind
                expected = word + 1
                while token >= 1 << 14:
                    changes[size] = (token & 127) | 128
                    token >>= 7
                    size += 1
                continues = token > 127
                changes[size] = (token & 127) | continues << 7
                changes[size + 1] = token >> 7
                size += 1 + continues
                if kind == 2:
                    changes[size] = new & _U(255)
                    changes[size + 1] = (new >> 8) & _U(255)
                    size += 2
            old >>= 16
            new >>= 16
    return size


def _apply(changes: Any, words: Any, starts: Any, added: Any) -> Any:
    """Applies `changes`, uint8 in the format of this module, to `words`, uint16. Adds to `added`, uint64 [tensors, 2],
    what the changes add to the two checksums (`Sums`) of each tensor. `starts`: the number of each tensor's first word.
    Returns False for changes that do not fit `words`."""
    position = -1
    tensor = 0
    at = 0
    while at < changes.shape[0]:
        token = 0
        shift = 0
        continues = True
        while continues:
            if at == changes.shape[0] or shift > 56:
                return False
            token |= (changes[at] & 127) << shift
            continues = changes[at] > 127
            shift += 7
            at += 1
        position += 1 + (token >> 2)
        kind = token & 3
        if kind == 3 or position >= words.shape[0] or (kind == 2 and at + 2 > changes.shape[0]):
            return False
        old = _U(words[position])
        if kind == 2:
            new = _U(changes[at]) | _U(changes[at + 1]) << 8
            at += 2
        elif kind == 0:
            new = (old + _U(1)) & _WORD
        else:
            new = (old - _U(1)) & _WORD
        words[position] = new
        while tensor + 1 < starts.shape[0] and starts[tensor + 1] <= position:
            tensor += 1
        x = _U(2) * _U(position - starts[tensor]) + GOLDEN
        added[tensor, 0] += (new - old) * key_of(x)
        added[tensor, 1] += (new - old) * key_of(x + _U(1))
    return True
