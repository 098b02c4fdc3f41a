"""How a lost replica is followed by another. Actors and references are stand-ins."""

from types import SimpleNamespace
from typing import Any

import pytest
from config_support import small

from inference import handle as group_module
from inference.handle import InferenceHandle
from trireme.config import Config
from trireme.core.errors import RoomFailed


class Actor:
    """Answers calls with references, which are tuples that begin with the actor."""

    def __init__(self, index: int, options: dict[str, Any]) -> None:
        self.index, self.options = index, options

    def __getattr__(self, verb: str) -> Any:
        return SimpleNamespace(remote=lambda *args: (self, verb, *args))


class World:
    """Two replicas, which have started, and all actors that are made later. `answers` has what
    references resolve to, the others do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []
        self.answers: dict[Any, Any] = {}
        monkeypatch.setattr(group_module, "_create", self._create)
        monkeypatch.setattr(group_module, "ready", self._ready)
        monkeypatch.setattr(group_module.ray, "kill", self.killed.append)
        config = small(inference={"replicas": 2})
        self.group = InferenceHandle.start(config, [{"num_cpus": 2, "num_gpus": 1}] * 2, None)
        for index in range(2):
            self.answers[self.group.ready_ref(index)] = None

    def _create(self, _config: Config, index: int, options: dict[str, Any], _log_dir: None) -> Actor:
        self.actors.append(Actor(index, options))
        return self.actors[-1]

    def _ready(self, refs: dict[Any, str], timeout_s: float) -> dict[Any, Any]:
        assert timeout_s == 0, "the supervisor has others to look after"
        return {ref: self.answers[ref] for ref in refs if ref in self.answers}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_an_actor_that_lost_its_engine_starts_another(world: World) -> None:
    replica = world.actors[0]
    assert world.group.lost_engine_ref(0) == (replica, "has_lost_engine")
    assert world.group.replace(0, same_actor=True) == (replica, "restart") == world.group.ready_ref(0)
    assert world.killed == []
    world.answers[world.group.ready_ref(0)] = RoomFailed("the second engine did not start")
    assert world.group.lost_engine_ref(0) is None, "it is asked once"
    world.group.replace(0, same_actor=False)
    assert world.killed == [replica]
    assert world.group.ready_ref(0) == (world.actors[-1], "start")


def test_one_that_is_still_starting_is_asked_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    del world.answers[world.group.ready_ref(1)]
    assert world.group.lost_engine_ref(1) is None
    stopped: list[Any] = []
    monkeypatch.setattr(group_module, "get_all", lambda refs, **_: stopped.extend(refs))
    world.group.stop()
    assert stopped == [(world.actors[0], "stop")]
    assert sorted(world.killed, key=id) == sorted(world.actors, key=id)
