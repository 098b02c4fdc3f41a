"""Work that is done once for each identity of weights, however many calls request it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

from trireme.core.types import WeightIdentity

Value = TypeVar("Value")


class OnceForEach(Generic[Value]):
    """Runs work once for each identity of weights. Keeps the newest work and its outcome."""

    def __init__(self) -> None:
        self._newest: tuple[WeightIdentity, asyncio.Task[Value]] | None = None

    async def run(self, identity: WeightIdentity, begin: Callable[[], Coroutine[object, object, Value]]) -> Value:
        """Returns or raises the outcome of the work for `identity`. If the last call had the same identity, and its
        work has not failed, waits for that work; else starts the work with `begin`. The work continues when a caller is
        cancelled."""
        if not (self._newest and self._newest[0] == identity and not _has_failed(self._newest[1])):
            self._newest = identity, asyncio.create_task(begin())
        return await asyncio.shield(self._newest[1])

    def forget(self) -> None:
        """Forgets the newest work, so that the next call starts its work anew, also for the same identity."""
        self._newest = None


def _has_failed(task: asyncio.Task[object]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
