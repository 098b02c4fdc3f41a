"""An attempt that fails is followed by another, as long as the supervisor allows it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from config_support import REQUIRED
from rich.console import Console

from trireme.config.load import load
from trireme.core.errors import BadInput, LimitReached, RoomFailed, ServicesLost
from trireme.launch import run as run_module
from trireme.launch.run import Newest, attempts
from trireme.run.rundir import RunDir
from trireme.supervision.roster import Roster

ENOUGH = 3


class World:
    """A run whose attempts are numbers, and its supervisor, which allows three attempts."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.attempt = 1
        self.config = self.fixed = None
        self.start = SimpleNamespace(notes=["another attempt"])

    def next_attempt(self, _config: Any, _fixed: Any) -> World:
        self.attempt += 1
        return self

    def may_rebuild(self, failure: RoomFailed) -> None:
        self.events.append(f"after {failure}")
        if self.attempt == ENOUGH:
            raise LimitReached("often enough") from failure

    def run(self, *outcomes: Exception | None) -> None:
        """`outcomes`: what the work of each attempt comes to."""
        remaining = list(outcomes)

        def work(run: Any) -> None:
            assert run is self
            self.events.append(f"attempt {self.attempt}")
            if outcome := remaining.pop(0):
                raise outcome

        run: Any = self
        attempts(run, Newest(run), run, work, self.events.append)
        assert not remaining


def test_another_attempt_follows_as_long_as_the_supervisor_allows_it() -> None:
    world = World()
    world.run(RoomFailed("a death"), None)
    assert world.events == ["attempt 1", "after a death", "another attempt", "attempt 2"]
    world = World()
    with pytest.raises(LimitReached, match="often enough"):
        world.run(*[RoomFailed("a death")] * ENOUGH)
    assert world.attempt == ENOUGH


def test_no_attempt_follows_other_errors_or_lost_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would wait for a place that no node can have."""
    world = World()

    def check_services() -> None:
        raise ServicesLost("raylet")

    monkeypatch.setattr(run_module, "check_services", check_services)
    with pytest.raises(ServicesLost):
        world.run(RoomFailed("a death"))
    assert world.events == ["attempt 1"]
    world = World()
    with pytest.raises(BadInput):
        world.run(BadInput("wrong"))
    assert world.events == ["attempt 1"]


class TestServices:
    """Ray's services end in some of the times that a cluster is started."""

    def launched(self, monkeypatch: pytest.MonkeyPatch, place: Path, lost: int, limit: int) -> list[int]:
        flags = [*REQUIRED, "--run.name", "r", "--run.output-dir", str(place)]
        config = load([*flags, "--cluster.max-restarts", str(limit)], {}).config
        begun: list[int] = []

        def in_cluster(_training: Any, newest: Newest, _roster: Roster, _console: Any) -> None:
            begun.append(newest.run.start.attempt)
            assert newest.rebuilt == (len(begun) > 1)
            if len(begun) <= lost:
                raise ServicesLost("Ray's services on this machine have ended")

        monkeypatch.setattr(run_module, "in_cluster", in_cluster)
        training: Any = SimpleNamespace(config=config, fixed={}, enter=lambda _run: None)
        console = Console(quiet=True)
        run_module.launch(training, console)
        return begun

    def test_ray_starts_again_up_to_a_limit(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        begun = self.launched(monkeypatch, tmp_path, lost=2, limit=2)
        assert begun == [1, 2, 3]
        incidents = [json.loads(line) for line in (tmp_path / "r" / "incidents.jsonl").open()]
        assert [incident["part"] for incident in incidents] == ["cluster"] * 2
        with pytest.raises(LimitReached, match=r"cluster failed 3 times.*cluster\.max_restarts"):
            self.launched(monkeypatch, tmp_path / "other", lost=3, limit=2)


def test_the_file_of_an_attempt_is_its_own(tmp_path: Path) -> None:
    flags = [*REQUIRED, "--run.output-dir", str(tmp_path), "--run.name", "r"]
    with RunDir.open(load(flags, {}).config, {}) as first:
        one = first.nonce.read_text()
    with RunDir.open(load([*flags, "--resume"], {}).config, {}) as second:
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


def test_what_a_checkpoint_has_of_unfinished_work_is_said_and_returned() -> None:
    """It stands in the incident of the return."""
    lines: list[str] = []
    silent, partial = (
        SimpleNamespace(load_state=lambda _path, _source, text=text: text) for text in ("", "3 of 4 were kept")
    )
    trainer = SimpleNamespace(load_state=lambda _path, _identities, _source: "")
    core: Any = SimpleNamespace(trainer=trainer, other_rooms={"silent": silent, "orchestrator": partial})
    console: Any = SimpleNamespace(print=lambda text, **_: lines.append(text))
    manifest: Any = SimpleNamespace(identities=())
    assert run_module.load(core, Path("c"), manifest, None, Roster(lambda: 0.0), console) == ["3 of 4 were kept"]
    assert lines == ["orchestrator: 3 of 4 were kept"]
