"""Lays out minibatches in a thread of its own, so that the event loop serves rollouts meanwhile.

    event loop --finished groups--> thread, which lays them out and stores them --lengths, references--> the driver

A part is all tokens of a minibatch that one process of the trainer computes. The thread works on one piece of a part at
a time (`trireme.core.batch.PIECE_TOKENS`), because a call of numpy holds Python's lock, and a call for a whole part
would hold it for too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from orchestrator.advantages import Keep, keep_whole
from trireme.core.types import Minibatch
from trireme.process import trace

Build = Callable[[Keep], Minibatch]
"""Builds a minibatch; its argument, a `Keep`, decides where the tokens are held."""
BuildOn = Callable[[Build], Awaitable[Minibatch]]
"""Calls a `Build`, on the event loop or in a thread, and returns the minibatch."""


async def build_here(build: Build) -> Minibatch:
    """Builds a minibatch on the event loop, not in a thread. The minibatch holds its tokens, and no references to the
    object store."""
    return build(keep_whole)


class LayoutThread:
    """A `BuildOn` that builds minibatches in a thread of its own, one at a time. `keep` decides where their tokens are
    held."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layout")

    async def __call__(self, build: Build) -> Minibatch:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._build, build)

    def _build(self, build: Build) -> Minibatch:
        with trace.span("lay_out", "layout"):
            return build(self._keep)

    def close(self) -> None:
        """Ends the thread. Does not wait for its present work."""
        self._thread.shutdown(wait=False)
