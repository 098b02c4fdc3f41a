"""Measures the cost of a request in tokens. `service.tinker.shares` gives models their turns by these costs.

A forward or backward pass costs its number of tokens, and is charged before it runs. Every other request (an update, a
save, an adapter that is created or loaded) is charged after it ran: its seconds, times the tokens per second of recent
passes with a gradient. So a model that saves a large adapter at each step pays for the time in which others waited.
"""

from __future__ import annotations

from service.tinker.codec import ForwardBackwardCall

LEAST = 256
"""The least tokens that a pass costs: a short pass takes its time too."""
REMEMBERED = 64
"""The speed is an average over about this number of passes."""


def tokens_of(work: object) -> int:
    """Returns the number of tokens to charge for a request before it runs. For a pass, this is the number of its
    tokens, but at least LEAST. For other requests, it is 0: they are charged after they ran (`MeasuredCosts`)."""
    if isinstance(work, ForwardBackwardCall):
        return max(work.tokens, LEAST)
    return 0


class MeasuredCosts:
    """Measures the trainer's speed in tokens per second, so that requests other than passes (an update or a save, for
    example) can be charged in tokens too. Such a request costs the seconds that it took, times this speed."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def record(self, work: object, seconds: float) -> int:
        """Records that a request took `seconds`. Returns the tokens that it costs in addition to `tokens_of`: 0 for
        passes, and 0 for all requests before the first pass with a gradient, because the speed is not known yet."""
        if not isinstance(work, ForwardBackwardCall):
            if self._seconds:
                return round(seconds * self._tokens / self._seconds)
            return 0
        if not work.forward_only:
            decay = 1 - 1 / REMEMBERED
            self._tokens = decay * self._tokens + tokens_of(work)
            self._seconds = decay * self._seconds + seconds
        return 0
