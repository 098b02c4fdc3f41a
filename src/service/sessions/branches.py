"""Branches: the tokens of a tree in columns, each token once.

    branch 0   prompt | answer | prompt | answer |            begins at no node
    branch 1            ^ answer | prompt | answer |          begins after the first prompt of branch 0

Tokens that follow the last token of a branch are appended to it, in a buffer that grows. Tokens that follow an earlier
token begin a branch of their own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
GROWTH = 1.5
"""A buffer that is full becomes larger by this factor."""
FIRST = 256
"""Number of tokens for which a new branch has memory."""


class Branch:
    """A sequence of tokens that begins after the end of node `origin` (-1: at the root of the tree), with a
    log-probability for each token: 0 for tokens that were not sampled."""

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.length = 0
        """Number of tokens. The arrays `tokens` and `logprobs` are longer."""
        self.nodes: list[int] = []
        self.tokens = np.empty(FIRST, np.int32)
        self.logprobs = np.empty(FIRST, np.float32)

    def append(self, node: int, tokens: TokenIds, logprobs: Logprobs | None) -> None:
        """Appends the tokens of `node`, [T], and their log-probabilities, [T]; `logprobs` None: the tokens were not
        sampled. Views of earlier tokens stay valid and unchanged."""
        end = self.length + len(tokens)
        if end > len(self.tokens):
            room = np.empty(max(end, int(len(self.tokens) * GROWTH)) - len(self.tokens), np.int32)
            self.tokens = np.concatenate([self.tokens, room])
            self.logprobs = np.concatenate([self.logprobs, room.view(np.float32)])
        self.tokens[self.length : end] = tokens
        self.logprobs[self.length : end] = 0 if logprobs is None else logprobs
        self.length = end
        self.nodes.append(node)
