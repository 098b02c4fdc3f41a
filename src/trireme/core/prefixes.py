"""Finds the datums of a batch that begin with the same tokens.

Datums are put in the order of a dictionary, so that equal beginnings follow each other. Then one number for each datum
is enough: how many tokens at its beginning it shares with the datum before it. Where this number is 0, a tree begins,
which ends before the next 0. Cutting a tree between any two datums leaves two trees: the prefix is computed in both.

    tokens   order   shared   own tokens
    A B C      0        0     A B C
    A B D E    2        2         D E
    A F        1        1       F
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
FEWEST_SHARED = 16
"""Datums with fewer common tokens share nothing. A common first token makes no tree."""


@dataclass(frozen=True)
class Forest:
    """The lengths of D datums, and the prefixes that they share."""

    lengths: Numbers
    """[D], the number of tokens of each datum."""
    order: Numbers
    """[D], the indices of the datums, sorted so that datums with equal beginnings follow each other."""
    shared: Numbers
    """[D], for each datum in `order`: the number of tokens at its beginning that it shares with the datum before it in
    `order`. It is 0 for the first datum, and if fewer than FEWEST_SHARED tokens are shared."""

    @classmethod
    def flat(cls, lengths: Numbers) -> Forest:
        """Returns the forest of datums that share nothing, in the order of `lengths`."""
        return cls(lengths, np.arange(len(lengths)), np.zeros(len(lengths), np.int64))

    @classmethod
    def find(cls, tokens_D: Sequence[npt.NDArray[np.int32]]) -> Forest:
        """Returns the forest of D datums with the tokens `tokens_D`, int32 [T] for each datum. Datums with the same
        tokens stay in the order that they have in `tokens_D`."""
        keys = [tokens.astype(">i4").tobytes() for tokens in tokens_D]  # compared as bytes, they order as their tokens
        order = np.asarray(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
        shared = np.zeros(len(order), np.int64)
        for k in range(1, len(order)):
            shared[k] = _common_length(tokens_D[order[k - 1]], tokens_D[order[k]])
        shared[shared < FEWEST_SHARED] = 0
        return cls(np.asarray([len(tokens) for tokens in tokens_D], np.int64), order, shared)

    @classmethod
    def find_in_groups(cls, tokens_N: Sequence[Sequence[npt.NDArray[np.int32]]]) -> Forest:
        """Returns the forest of the datums of N groups, in which only datums of the same group share prefixes.
        `tokens_N`: for each group the tokens of its datums. Datums are numbered group after group."""
        forests = [cls.find(tokens_D) for tokens_D in tokens_N]
        firsts = np.cumsum([0, *(len(forest) for forest in forests)])
        return cls(
            np.concatenate([forest.lengths for forest in forests]),
            np.concatenate([forest.order + first for forest, first in zip(forests, firsts, strict=False)]),
            np.concatenate([forest.shared for forest in forests]),
        )

    def __len__(self) -> int:
        return len(self.lengths)


def _common_length(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Returns the length, in tokens, of the longest common prefix of both arrays."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    if len(differing):
        return int(differing[0])
    return length
