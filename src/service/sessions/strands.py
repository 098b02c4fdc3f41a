"""Strands: the tokens of a tree in columns, each token once.

    strand 0   prompt | answer | prompt | answer |            begins at no node
    strand 1            ^ answer | prompt | answer |          begins behind the first prompt of strand 0

What follows the last token of a strand is written behind it, into a buffer that grows. What follows an earlier token
begins a strand of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GROWTH = 1.5
"""A buffer that is full becomes larger by this factor."""
FIRST = 256
"""Tokens for which a new strand has room."""


class Strand:
    """The tokens behind node `origin` (-1: behind none), with log-probabilities: 0 for those that were not sampled."""

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.length = 0
        self.nodes: list[int] = []
        self._tokens = np.empty(FIRST, np.int32)
        self._logprobs = np.empty(FIRST, np.float32)

    def append(self, node: int, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32] | None) -> None:
        """Takes the tokens of a node. What was handed out before does not change: only what is behind it is written."""
        end = self.length + len(tokens)
        if end > len(self._tokens):
            self._grow(max(end, int(len(self._tokens) * GROWTH)))
        self._tokens[self.length : end] = tokens
        self._logprobs[self.length : end] = 0 if logprobs is None else logprobs
        self.length = end
        self.nodes.append(node)

    def tokens(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Returns a part of the tokens, not copied."""
        return self._tokens[start:end]

    def logprobs(self, start: int, end: int) -> npt.NDArray[np.float32]:
        """Returns the log-probabilities of a part of the tokens, not copied."""
        return self._logprobs[start:end]

    def _grow(self, room: int) -> None:
        tokens, logprobs = np.empty(room, np.int32), np.empty(room, np.float32)
        tokens[: self.length], logprobs[: self.length] = self._tokens[: self.length], self._logprobs[: self.length]
        self._tokens, self._logprobs = tokens, logprobs
