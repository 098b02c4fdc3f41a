"""The calls to one replica, which all end when it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from trireme.core.errors import TriremeError, WeightsGone

Value = TypeVar("Value")


class ReplicaCalls:
    """Makes the calls to one replica until the replica is given up. If a call raises a TriremeError other than
    WeightsGone, passes the error to the function `fails`, which has to give the replica up by calling `end`."""

    def __init__(self, fails: Callable[[TriremeError], None]) -> None:
        self.failure: TriremeError | None = None
        """Why the replica was given up; None while it is used."""
        self._fails = fails
        self._tasks: set[asyncio.Task[object]] = set()

    def add(self, task: asyncio.Task[object]) -> None:
        """Makes sure that `task` is cancelled when the replica is given up."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def call(self, work: Awaitable[Value]) -> Value:
        """Waits for `work`, a call to the replica, and returns its value. If the replica is given up meanwhile, raises
        the reason at once. If `work` raises a TriremeError, gives the replica up and raises the error. After
        WeightsGone the replica is kept, because it is not to blame."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        try:
            await asyncio.wait({task})
            if not task.cancelled():
                return task.result()
        except WeightsGone:
            raise
        except TriremeError as failure:
            self._fails(failure)
            raise
        finally:
            task.cancel()
            self._tasks.discard(task)
        assert self.failure is not None, "tasks are cancelled only when the replica is gone"
        raise self.failure

    def end(self, reason: TriremeError) -> None:
        """Gives the replica up for `reason`: cancels all its calls and tasks."""
        self.failure = reason
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
