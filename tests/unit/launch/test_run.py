"""An attempt that fails is followed by another, as long as the supervisor allows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trireme.core.errors import BadInput, LimitReached, RoomFailed
from trireme.launch.run import attempts

ENOUGH = 3


class World:
    """A run whose attempts are numbers, and its supervisor, which allows three attempts."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.attempt = 1
        self.config = self.fixed = None
        self.start = SimpleNamespace(notes=["another attempt"])

    def next_attempt(self, _config: Any, _fixed: Any) -> World:
        self.attempt += 1
        return self

    def may_rebuild(self, failure: RoomFailed) -> None:
        self.told.append(f"after {failure}")
        if self.attempt == ENOUGH:
            raise LimitReached("often enough") from failure

    def run(self, *outcomes: Exception | None) -> None:
        """`outcomes`: what the work of each attempt comes to."""
        left = list(outcomes)

        def work(run: Any) -> None:
            assert run is self
            self.told.append(f"attempt {self.attempt}")
            if outcome := left.pop(0):
                raise outcome

        run: Any = self
        attempts(run, run, run, work, self.told.append)
        assert not left


def test_another_attempt_follows_until_the_work_is_done() -> None:
    world = World()
    world.run(RoomFailed("a death"), None)
    assert world.told == ["attempt 1", "after a death", "another attempt", "attempt 2"]


def test_it_ends_with_what_the_supervisor_says() -> None:
    world = World()
    with pytest.raises(LimitReached, match="often enough"):
        world.run(*[RoomFailed("a death")] * ENOUGH)
    assert world.attempt == ENOUGH


def test_other_errors_end_the_run() -> None:
    world = World()
    with pytest.raises(BadInput):
        world.run(BadInput("wrong"))
    assert world.told == ["attempt 1"]
