"""The time limits of rollouts and answers, which all share one timer of the event loop.

    limit(seconds) --with--> heap by due time --the first is due--> its task is cancelled --> TimeoutError

A rollout in flight has two. `asyncio.timeout` gives each a handle, a timer of the loop and copies of the context, which
are a kilobyte for a rollout. An entry whose limit has ended stays in the heap until it is due, or until half of all are
such entries.
"""

from __future__ import annotations

import asyncio
from heapq import heapify, heappop, heappush
from itertools import count
from types import TracebackType

FEW = 64
"""With so few entries in the heap it does not matter how many of them have ended."""


class TimeLimit:
    """Limits what its task does within `with`: from the moment when it is due, the task is cancelled, and the block
    raises TimeoutError, as that of `asyncio.timeout` does."""

    __slots__ = ("_cancelling", "_due", "_expired", "_of", "_task")

    def __init__(self, of: TimeLimits, due: float) -> None:
        self._of = of
        self._due: float | None = due
        self._task: asyncio.Task[object] | None = None  # within the block
        self._cancelling = 0
        self._expired = False

    def when(self) -> float | None:
        """Returns when it is due, by the clock of the event loop; None: it does not run."""
        return self._due

    def reschedule(self, due: float | None) -> None:
        """Makes it due at another time. None: it does not run until the next call."""
        self._due = due
        self._of.schedule(self)

    def expired(self) -> bool:
        """True once its time was over within the block."""
        return self._expired

    @property
    def runs(self) -> bool:
        """True within the block, until its time is over."""
        return self._task is not None and not self._expired

    def expire(self) -> None:
        """Cancels the task, which then raises TimeoutError."""
        assert self._task is not None, "a limit expires within its block"
        self._expired = True
        self._task.cancel()

    def __enter__(self) -> TimeLimit:
        self._task = asyncio.current_task()
        assert self._task is not None, "time limits are those of tasks"
        self._cancelling = self._task.cancelling()
        self._of.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        self._of.end(self)
        assert task is not None, "it was entered"
        # With further requests to cancel the task, those go first.
        if self._expired and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error


class TimeLimits:
    """All time limits of one event loop."""

    def __init__(self) -> None:
        self._running: set[TimeLimit] = set()  # those within their blocks
        self._heap: list[tuple[float, int, TimeLimit]] = []  # with when each was due; later entries of a limit count
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None

    def limit(self, seconds: float) -> TimeLimit:
        """Returns a limit of so many seconds from now."""
        return TimeLimit(self, asyncio.get_running_loop().time() + seconds)

    def begin(self, limit: TimeLimit) -> None:
        """Takes note that the block of a limit begins."""
        self._running.add(limit)
        self.schedule(limit)

    def end(self, limit: TimeLimit) -> None:
        """Takes note that the block of a limit has ended."""
        self._running.discard(limit)
        if not self._running:
            self._heap.clear()
            self._set_timer(None)
        elif len(self._heap) > FEW and len(self._heap) > 2 * len(self._running):
            self._heap = [entry for entry in self._heap if _counts(entry)]
            heapify(self._heap)

    def schedule(self, limit: TimeLimit) -> None:
        """Takes note of when a limit is due, if it runs."""
        due = limit.when()
        if due is None or not limit.runs:
            return
        heappush(self._heap, (due, next(self._numbers), limit))
        if self._timer is None or due < self._timer.when():
            self._set_timer(due)

    def _look(self) -> None:
        """Ends what is due, and waits for the next."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._heap and (self._heap[0][0] <= now or not _counts(self._heap[0])):
            entry = heappop(self._heap)
            if _counts(entry):
                entry[2].expire()
        if self._heap:
            self._set_timer(self._heap[0][0])

    def _set_timer(self, due: float | None) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None if due is None else asyncio.get_running_loop().call_at(due, self._look)


def _counts(entry: tuple[float, int, TimeLimit]) -> bool:
    """True for an entry whose limit still runs and is due then."""
    due, _, limit = entry
    return limit.runs and limit.when() == due
