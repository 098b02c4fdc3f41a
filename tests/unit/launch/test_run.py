"""An attempt that fails is followed by another, as long as the supervisor allows it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trireme.config.load import load
from trireme.core.errors import BadInput, LimitReached, RoomFailed
from trireme.launch import run as run_module
from trireme.launch.run import attempts, check_shared
from trireme.process import waits
from trireme.process.environ import view_of
from trireme.run.rundir import RunDir
from trireme.supervision.roster import Roster

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


class Blind:
    """A room whose processes see `views` of any file."""

    def __init__(self, **views: tuple[str, str]) -> None:
        self._views = views

    def views(self, _file: Path) -> dict[str, Any]:
        return self._views


class TestSharedDirectory:
    @pytest.fixture
    def nonce(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A file of the driver; references of Ray are their own values."""
        monkeypatch.setattr(waits, "get_all", lambda refs, **_: refs)
        file = tmp_path / "out" / "run" / "logs" / "attempt_1" / "HEAD"
        file.parent.mkdir(parents=True)
        file.write_text("attempt 1")
        return file

    def test_whoever_sees_it_is_welcome(self, nonce: Path) -> None:
        check_shared([Blind(trainer_0=view_of(nonce)), Blind(orchestrator_0=("far", "attempt 1"))], nonce, 1.0)

    @pytest.mark.parametrize("seen", ["", "attempt 1 of another run"])
    def test_a_node_with_another_directory_of_that_name_is_refused_by_its_name(self, nonce: Path, seen: str) -> None:
        rooms = [Blind(trainer_0=view_of(nonce), trainer_1=("far", seen)), Blind(orchestrator_0=view_of(nonce))]
        with pytest.raises(BadInput) as refused:
            check_shared(rooms, nonce, 1.0)
        text = str(refused.value)
        assert f"given: run.output_dir = {nonce.parents[3]}, in which far (trainer_1) does not see {nonce}" in text
        assert "to do: put --run.output-dir on a file system that they share" in text

    def test_what_is_not_there_is_seen_as_nothing(self, tmp_path: Path) -> None:
        assert view_of(tmp_path / "HEAD") == (os.uname().nodename, "")


def test_the_file_of_an_attempt_is_its_own(tmp_path: Path) -> None:
    flags = ["--model.name", "./m", "--env.id", "sort", "--orchestrator.batch-size", "2"]
    place = ["--inference.sampling.max-tokens", "3", "--run.output-dir", str(tmp_path), "--run.name", "r"]
    with RunDir.open(load([*flags, *place], {}).config, {}) as first:
        one = first.nonce.read_text()
    with RunDir.open(load([*flags, *place, "--resume"], {}).config, {}) as second:
        assert second.nonce.read_text() not in ("", one)


def test_an_attempt_waits_for_the_places_of_what_it_starts_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas, which outlive it, wait for theirs beside it."""
    waited_for: list[str] = []

    def await_places(options: dict[str, Any], timeout_s: float, progress: Any) -> None:
        waited_for.extend([*options, str(timeout_s)])
        for waited_s in (0.0, 1.0, 7.0):
            progress(["a place in the cluster for the trainer (1 of 2 actors)"], waited_s)

    monkeypatch.setattr(run_module, "await_places", await_places)
    training: Any = SimpleNamespace(
        places={"trainer": [{}], "orchestrator": [{}], "inference": [{}]},
        lasting=frozenset({"inference"}),
        core="trainer and orchestrator",
        config=SimpleNamespace(timeouts=SimpleNamespace(place_s=60.0)),
    )
    supervisor: Any = SimpleNamespace(roster=Roster(lambda: 0.0), check=lambda: None)
    console: Any = SimpleNamespace(print=lambda text, **_: waited_for.append(text))
    run_module.await_own_places(training, supervisor, console)
    assert waited_for[:3] == ["trainer", "orchestrator", "60.0"]
    assert waited_for[3:] == ["waiting for a place in the cluster for the trainer (1 of 2 actors) (7 s)"]
    (incident,) = supervisor.roster.incidents
    assert "waits for a place in the cluster for the trainer (1 of 2 actors); add a node" in incident.what
