"""Limits how often parts may be started again. Pure: uses neither Ray nor a clock."""

from __future__ import annotations

import re
from collections import defaultdict, deque

from trireme.core.errors import LimitReached, TriremeError

NUMBERS = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+")
COMPARED = 400
"""Number of characters of two errors' messages that are compared: a message begins with what happened, and ends with
where."""


class Restarts:
    """The restart budget of one command: each part may be restarted at most `limit` times in any `window_s` seconds.

    If code raises the same error twice, without a completed step in between, the budget ends: another start would not
    help. The death of a process does not count as such an error.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._taken: defaultdict[str, deque[float]] = defaultdict(deque)
        self._last: dict[str, tuple[str, int]] = {}

    def take(self, part: str, failure: TriremeError, *, died: bool, step: int, now: float) -> None:
        """Counts a restart of `part` after `failure`, with `step` steps completed. Raises LimitReached if the budget is
        used up. Raises `failure` itself if the budget is 0, or if the last error of `part` was the same and came at the
        same step.

        `died`: the process ended, or was killed because it did not answer; then errors are not compared. `now`: seconds
        of a monotonic clock.
        """
        if not self._limit:
            raise failure
        if not died:
            message = (NUMBERS.sub("#", str(failure))[:COMPARED], step)
            if self._last.get(part) == message:
                failure.add_note(f"{part} was started again after the same error, and raised it again.")
                raise failure
            self._last[part] = message
        taken = self._taken[part]
        while taken and now - taken[0] > self._window_s:
            taken.popleft()
        if len(taken) >= self._limit:
            raise LimitReached(
                f"{part} failed {len(taken) + 1} times within {now - taken[0]:.0f} s, and may be started again at most "
                f"{self._limit} times (cluster.max_restarts) in {self._window_s:g} s (cluster.restart_window_s). "
                f"The last failure: {failure}"
            )
        taken.append(now)
