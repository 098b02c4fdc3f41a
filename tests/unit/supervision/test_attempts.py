"""An attempt that fails is followed by another, as long as whoever watches allows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from trireme.core.errors import BadInput, LimitReached, RoomFailed
from trireme.supervision.attempts import attempts

ENOUGH = 3


class World:
    """A run whose attempts are numbers, and who watches it: three attempts and no more."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.start = SimpleNamespace(notes=["from the newest commit"])
        self.attempt = 1

    def next_attempt(self, _config: Any, fixed: Any) -> World:
        assert fixed == {"fixed": 1}
        self.attempt += 1
        return self

    def goes_on(self) -> None:
        self.told.append(f"attempt {self.attempt} goes on")

    def may_rebuild(self, failure: RoomFailed) -> None:
        self.told.append(f"after {failure}")
        if self.attempt == ENOUGH:
            raise LimitReached("often enough") from failure

    @contextmanager
    def begun(self, _run: Any) -> Iterator[str]:
        try:
            yield "rooms"
        finally:
            self.told.append(f"rooms of {self.attempt} are down")

    def run(self, *outcomes: Exception | None) -> None:
        """`outcomes`: what the work of each attempt comes to."""
        left = list(outcomes)

        def work(_run: Any, rooms: str) -> None:
            assert rooms == "rooms"
            if outcome := left.pop(0):
                raise outcome

        config: Any = None
        run: Any = self
        attempts(config, run, {"fixed": 1}, run, self.begun, work, self.told.append)
        assert not left


def test_it_goes_on_until_the_work_is_done() -> None:
    world = World()
    world.run(RoomFailed("a death"), None)
    assert world.told == [
        "attempt 1 goes on",
        "rooms of 1 are down",
        "after a death",
        "from the newest commit",
        "attempt 2 goes on",
        "rooms of 2 are down",
    ]


def test_it_ends_with_what_the_supervisor_says() -> None:
    world = World()
    with pytest.raises(LimitReached, match="often enough"):
        world.run(*[RoomFailed("a death")] * ENOUGH)
    assert world.attempt == ENOUGH


def test_other_errors_end_the_run() -> None:
    world = World()
    with pytest.raises(BadInput):
        world.run(BadInput("wrong"))
    assert world.told == ["attempt 1 goes on", "rooms of 1 are down"]
