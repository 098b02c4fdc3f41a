"""The driver's handle of the replica set, whose actor a stand-in plays: how it waits for the replicas' sleep."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from config_support import small
from ray.exceptions import ActorDiedError

from inference.replica_set import handle as handle_module
from inference.replica_set.handle import ReplicaSetHandle
from trireme.core.errors import RoomFailed


class World:
    """Counts incarnations; `answers` has, for each call of `sleep`, the failure of the call, or None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[RoomFailed | None]) -> None:
        self.answers = answers
        self.incarnations = 0
        self.asked: list[tuple[int, str]] = []
        context = SimpleNamespace(get_node_id=lambda: "node")
        ray = SimpleNamespace(get_runtime_context=lambda: context, kill=lambda _actor: None)
        monkeypatch.setattr(handle_module, "ray", ray)
        monkeypatch.setattr(handle_module, "on_node", lambda node: node)
        monkeypatch.setattr(handle_module, "create_actor", lambda *_, **__: self.create)
        monkeypatch.setattr(handle_module, "AGAIN_S", 0.0)
        monkeypatch.setattr(handle_module.waits, "get_all", self.get_all)
        self.replicas = ReplicaSetHandle(small(), None)

    def create(self, *_: object, **__: object) -> Any:
        self.incarnations += 1
        number = self.incarnations
        verbs = ("start", "sleep", "try_update")
        return SimpleNamespace(**{verb: SimpleNamespace(remote=lambda *_, v=verb: (number, v)) for verb in verbs})

    def get_all(self, refs: list[Any], *, owners: list[str], timeout_s: float, on_tick: Any, **_: object) -> None:
        assert owners == ["replica set (which puts the replicas to sleep)"]
        assert 0 < timeout_s <= self.replicas._config.update_deadline_s
        self.asked += refs
        on_tick(owners, 1.0)
        failure = self.answers.pop(0)
        if failure:
            raise failure


def lost() -> RoomFailed:
    failure = RoomFailed("replica set died")
    failure.__cause__ = ActorDiedError()
    return failure


def test_the_sleep_of_a_set_that_is_lost_is_that_of_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, [lost(), lost(), None])
    ticks: list[int] = []

    def on_tick() -> None:
        ticks.append(len(world.asked))
        if len(ticks) == 4:
            world.replicas.begin_again({}, {})

    world.replicas.sleep(on_tick)
    assert world.asked == [(1, "sleep"), (1, "sleep"), (2, "sleep")]
    assert ticks == [1, 1, 2, 2, 3], "in each wait and after each loss"


@pytest.mark.parametrize("failure", [RoomFailed("replica 1 died"), RoomFailed("waited 90 s for replica set")])
def test_another_failure_ends_the_wait(monkeypatch: pytest.MonkeyPatch, failure: RoomFailed) -> None:
    world = World(monkeypatch, [failure])
    with pytest.raises(RoomFailed, match=str(failure)):
        world.replicas.sleep(lambda: None)


def test_the_failure_of_a_room_ends_the_wait_whatever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a trainer's shard looks as that of the set."""
    world = World(monkeypatch, [])

    def on_tick() -> None:
        failure = lost()
        failure.args = ("trainer shard 1 died",)
        raise failure from failure.__cause__

    with pytest.raises(RoomFailed, match="trainer shard 1 died"):
        world.replicas.sleep(on_tick)
    assert world.asked == [(1, "sleep")]


@pytest.mark.parametrize("verb", ["update", "sleep"])
def test_what_the_driver_does_while_an_incarnation_begins_comes_last(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    world = World(monkeypatch, [None])
    old = cast(Any, SimpleNamespace(identity="old"))
    new = cast(Any, SimpleNamespace(identity="new"))
    calls: list[str] = []
    verbs = {"update": lambda: world.replicas.update(new), "sleep": lambda: world.replicas.sleep(lambda: None)}
    driver = threading.Thread(target=verbs[verb])

    def try_update(weights: Any) -> None:
        if weights is old and world.incarnations == 2:
            driver.start()
            driver.join(0.1)  # the driver's call must wait for this one
        calls.append(weights.identity)

    def create(*_: object, **__: object) -> Any:
        world.incarnations += 1
        remotes = {"start": lambda _: None, "sleep": lambda: calls.append("sleep"), "try_update": try_update}
        return SimpleNamespace(**{name: SimpleNamespace(remote=remote) for name, remote in remotes.items()})

    monkeypatch.setattr(world, "create", create)
    world.incarnations = 0
    world.replicas = ReplicaSetHandle(small(), None)
    world.replicas.update(old)
    world.replicas.begin_again({}, {})
    driver.join(10.0)
    assert calls == ["old", "old", {"update": "new", "sleep": "sleep"}[verb]]
