"""The rooms of an attempt of `rl`: how they begin, and in which order they end."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from trireme.launch import rl
from trireme.launch.rl import RlRun


class Room:
    def __init__(self, name: str, ended: list[str]) -> None:
        self.name, self._ended = name, ended

    def offer(self) -> None:
        """Stands for a verb."""

    def offer_by(self, offer: Any, timeout_s: float) -> None:
        """Stands for a verb."""

    def stop(self) -> None:
        self._ended.append(self.name)


def test_each_attempt_has_rooms_of_its_own_and_the_orchestrator_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes its environments while the trainer, dead or alive, is still there."""
    ended: list[str] = []
    training: Any = object.__new__(RlRun)
    training.config = SimpleNamespace(timeouts=SimpleNamespace(update_s=1.0))
    training.plan = SimpleNamespace(resolved=lambda config: config)
    training.places = {"trainer": [], "orchestrator": [{}]}
    training._service = None
    numbers = iter(range(1, 5))
    trainer = SimpleNamespace(start=lambda *_: Room(f"trainer {next(numbers)}", ended))
    monkeypatch.setattr(rl, "TrainerHandle", trainer)
    monkeypatch.setattr(RlRun, "_start_orchestrator", lambda *_: Room(f"orchestrator {next(numbers)}", ended))
    run: Any = SimpleNamespace(logs=None, start=SimpleNamespace(attempt=1))
    for _ in range(2):
        with ExitStack() as ending:
            core = training.start(run, ending)
            assert [room.name for room in core.rooms] == [core.trainer.name, core.others["orchestrator"].name]
    assert ended == ["orchestrator 2", "trainer 1", "orchestrator 4", "trainer 3"]
