"""An event loop whose clock jumps: code that waits for hours of timers runs in the time that its own work takes.

`virtual_time.run(main())`. Whenever no callback is ready, `time()` becomes the moment of the next
timer. When there is none, or none within a day, nothing will ever happen: that is a Deadlock, which says what waits.
There is nothing but the loop: threads, sockets and processes are refused, since they would need real time.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

NEVER_S = 24 * 3600.0
"""A timer that is further away does not count. asyncio asks a selector to wait for at most this long."""
NAMED = 12

T = TypeVar("T")


class Deadlock(Exception):
    """Everything waits, and nothing is left that could end a wait."""


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module's docstring. It is its own selector: asyncio calls `select` when it would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = self

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Instead of sleeping for `timeout` seconds (none: without end)."""
        if timeout is None or timeout >= NEVER_S:
            raise Deadlock(f"at {self._now:g} s nothing will ever happen; {what_waits(self)}")
        self._now += timeout
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """Nothing ever comes from outside."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:
        raise RuntimeError(f"{func} was given to a thread; under a virtual clock everything runs on the loop")

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> NoReturn:
        raise RuntimeError(f"{callback} comes from a thread; under a virtual clock everything runs on the loop")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Works as `asyncio.run`, under a virtual clock that begins at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def what_waits(loop: asyncio.AbstractEventLoop) -> str:
    """Where the tasks of a loop stand, the most common places first."""
    places = Counter(_place(task) for task in asyncio.all_tasks(loop))
    lines = [f"{count} x {place}" for place, count in places.most_common(NAMED)]
    return f"{places.total()} tasks wait:\n  " + "\n  ".join(lines)


def _place(task: asyncio.Task[Any]) -> str:
    """The line of the innermost coroutine that a task waits in."""
    coroutine: Any = task.get_coro()
    while hasattr(getattr(coroutine, "cr_await", None), "cr_frame"):
        coroutine = coroutine.cr_await
    frame = getattr(coroutine, "cr_frame", None)
    return f"{frame.f_code.co_qualname}, {frame.f_code.co_filename}:{frame.f_lineno}" if frame else task.get_name()
