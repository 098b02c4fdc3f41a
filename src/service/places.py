"""Limits how many chats (requests of clients) engines sample at the same time, because the run's requests come
first."""

from __future__ import annotations

import asyncio
from collections import deque

from service.requests import RequestRefused


class Places:
    """Limits the answers that are sampled at the same time to `places`, first come, first served. `async with` on this
    object waits for a place and holds it; after `wait_s` seconds without a place it raises RequestRefused (429). The
    argument `waiting` is the most answers that may wait for a place: `check` refuses further answers."""

    def __init__(self, places: int, waiting: int, wait_s: float) -> None:
        self.places = places
        self._most_waiting = waiting
        self._wait_s = wait_s
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """The number of answers that are waiting for a place now."""
        return len(self._waiting)

    def resize(self, places: int) -> None:
        """Changes the number of places. Answers that hold a place keep it, also if there are fewer places now."""
        self.places = places
        self._hand_out()

    def check(self, answers: int) -> None:
        """Raises RequestRefused if `answers` more answers would exceed the places and the queue together."""
        limit = self.places + self._most_waiting
        if answers > limit:
            raise RequestRefused(
                f"{answers} answers in one request; expected at most {limit} (the places of chats and "
                "service.max_waiting)",
                param="n",
            )
        if self.taken + self.waiting + answers > limit:
            raise RequestRefused(
                f"{self.taken} answers are being sampled and {self.waiting} wait, of at most {self.places} and "
                f"{self._most_waiting} (service.max_waiting): send the request again later",
                status=429,
                code="queue_full",
                retry_after_s=self._retry_after_s,
            )

    async def __aexit__(self, *error: object) -> None:
        self.taken -= 1
        self._hand_out()

    async def __aenter__(self) -> None:
        if not self._waiting and self.taken < self.places:  # as nearly always: it needs no timer
            self.taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._hand_out()
        try:
            async with asyncio.timeout(self._wait_s):  # `wait_for` loses a cancellation that comes with the turn
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn.done() and not turn.cancelled():  # its turn came in the same moment
                self.taken -= 1
                self._hand_out()
            if isinstance(error, TimeoutError):
                raise RequestRefused(
                    f"waited {self._wait_s:g} s (service.wait_s) for one of {self.places} places, which service.share "
                    "leaves chats of those of the replicas: send the request again later",
                    status=429,
                    code="queue_timeout",
                    retry_after_s=self._retry_after_s,
                ) from None
            raise

    @property
    def _retry_after_s(self) -> float:
        """The estimated seconds until a place is free: 1, plus the waiting answers divided by the places, rounded
        down."""
        return 1.0 + self.waiting // max(self.places, 1)

    def _hand_out(self) -> None:
        while self._waiting and self.taken < self.places:
            turn = self._waiting.popleft()
            if not turn.done():
                self.taken += 1
                turn.set_result(None)
