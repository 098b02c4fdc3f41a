"""Tasks that run in the background, whose first error is raised by the next call of the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from trireme.core.errors import LimitReached


class BackgroundTasks:
    """Starts tasks and keeps the first error of any; `failed` is called after each error."""

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._error = self._error or error
            self._failed()

    @property
    def limit_reached(self) -> bool:
        """True if the first error is that of a limit of the run."""
        return isinstance(self._error, LimitReached)

    def raise_error(self, but_limits: bool = False) -> None:
        """Raises the first error. `but_limits`: not a limit of the run, which the next minibatch raises, so that the
        step in hand is finished and the run can be committed where it stops."""
        if self._error and not (but_limits and self.limit_reached):
            raise self._error

    async def stop(self) -> None:
        """Cancels all tasks and waits for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
