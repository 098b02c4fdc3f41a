"""When a spare succeeds a lost replica. Actors and references are stand-ins; real ones: tests/e2e/test_spare.py."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from config_support import small

from inference import handle as group_module
from inference.actor import ReplicaInfo
from inference.handle import InferenceHandle
from trireme.config import Config
from trireme.core.errors import RoomFailed

DIED = RoomFailed("it died")


class Actor:
    """Answers calls with references, which are tuples that begin with the actor; one that is `dead`, with an error.
    Those to `prepare` are numbered: what one call was answered says nothing of the next."""

    def __init__(self, index: int | None, options: dict[str, Any]) -> None:
        self.index, self.options, self.dead = index, options, False
        self.hangs = self.lost_engine = False
        self.asked = count()

    def __getattr__(self, verb: str) -> Any:
        return SimpleNamespace(
            remote=lambda *args: (self, verb, next(self.asked)) if verb == "prepare" else (self, verb, *args)
        )


class World:
    """Two replicas on the nodes a and b, which have started, and all actors that are made later. `answers` has what
    references resolve to, the others do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spare: bool) -> None:
        self.made: list[Actor] = []
        self.killed: list[Actor] = []
        self.prepared: list[Actor] = []
        self.answers: dict[Any, Any] = {}
        monkeypatch.setattr(group_module, "_create", self._create)
        monkeypatch.setattr(group_module, "ready", self._ready)
        monkeypatch.setattr(group_module, "on_node", lambda node: node)
        monkeypatch.setattr(group_module.ray, "kill", self.killed.append)
        config = small(inference={"replicas": 2, "spare": spare})
        self.group = InferenceHandle.start(config, [{"num_cpus": 2, "num_gpus": 1}] * 2, None)
        for index, node in enumerate("ab"):
            self.answers[self.group.ready_ref(index)] = ReplicaInfo(100 + index, (100 + index,), None, node, str(index))

    def _create(self, _config: Config, index: int | None, options: dict[str, Any], _log_dir: None) -> Actor:
        self.made.append(Actor(index, options))
        return self.made[-1]

    def _ready(self, refs: dict[Any, str], timeout_s: float) -> dict[Any, Any]:
        assert timeout_s <= group_module.ALIVE_S, "the supervisor has others to look after"
        answers = {ref: self.answers.get(ref, self._answer(ref)) for ref in refs}
        there = {ref: value for ref, value in answers.items() if value is not self}
        self.answers |= there
        return there

    def _answer(self, ref: Any) -> Any:
        actor, verb = ref[0], ref[1]
        if verb == "has_lost_engine" and not actor.hangs:
            return DIED if actor.dead else actor.lost_engine
        return DIED if actor.dead else None if verb == "prepare" and actor in self.prepared else self

    def spares(self) -> list[Actor]:
        return [actor for actor in self.made if actor.index is None]

    def prepare(self, spare: Actor) -> None:
        self.prepared.append(spare)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World(monkeypatch, spare=True)
    found.group.keep_spares()
    return found


def test_there_is_one_on_each_node_which_takes_nothing_of_it(world: World) -> None:
    world.group.keep_spares()
    assert sorted(spare.options["scheduling_strategy"] for spare in world.spares()) == ["a", "b"]
    assert {(spare.options["num_cpus"], spare.options["num_gpus"]) for spare in world.spares()} == {(0, 0)}


def test_there_is_none_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    without = World(monkeypatch, spare=False)
    without.group.keep_spares()
    assert without.spares() == []


def test_the_one_on_its_node_succeeds_a_replica(world: World) -> None:
    (spare,) = (spare for spare in world.spares() if spare.options["scheduling_strategy"] == "b")
    world.prepare(spare)
    lost, health = world.made[1], world.answers[world.group.ready_ref(1)]
    assert world.group.replace(1) == (spare, "succeed", 1, health) == world.group.ready_ref(1)
    assert world.killed == [lost]
    assert world.group.client(1).handle is spare
    world.answers[world.group.ready_ref(1)] = health
    world.group.keep_spares()
    assert [each.options["scheduling_strategy"] for each in world.spares()[2:]] == ["b"], "and another is made"


@pytest.mark.parametrize("why", ["it imports still", "it died", "it says nothing"])
def test_a_new_process_does_when_the_spare_is_of_no_use(
    world: World, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spare,) = (spare for spare in world.spares() if spare.options["scheduling_strategy"] == "a")
    if why != "it imports still":
        world.prepare(spare)
    spare.dead = why == "it died"
    if why == "it says nothing":
        asked: list[Any] = []

        def deaf(refs: dict[Any, str], timeout_s: float) -> dict[Any, Any]:
            asked.extend(ref for ref in refs if ref[0] is spare)
            return {} if asked[1:] else world._ready(refs, timeout_s)

        monkeypatch.setattr(group_module, "ready", deaf)
    world.group.replace(0)
    made = world.made[-1]
    assert (made.index, world.group.ready_ref(0)) == (0, (made, "start"))
    assert (spare in world.killed) == (why != "it imports still"), "it may be of use to the next"


def test_one_that_died_is_followed_by_another_but_not_for_ever(world: World) -> None:
    limit = world.group.config.cluster.max_restarts
    for died in range(limit + 1):
        for spare in world.spares():
            world.prepare(spare)
        world.group.keep_spares()
        assert len(world.spares()) == 2 + died
        dead = world.spares()[-1]
        dead.dead = True
        for _ in range(2):  # at the first look it may have answered the one before, while it lived
            world.group.keep_spares()
        assert world.killed[-1] is dead
    assert len(world.spares()) == 2 + limit, "no more are made"
    assert len({spare.options["scheduling_strategy"] for spare in world.spares()[1:]}) == 1, "all on one node"


def test_an_actor_that_lost_its_engine_starts_another_and_the_spare_stays(world: World) -> None:
    for spare in world.spares():
        world.prepare(spare)
    replica = world.made[0]
    replica.lost_engine = True
    assert world.group.replace(0) == (replica, "restart") == world.group.ready_ref(0)
    assert world.killed == []
    assert len(world.spares()) == 2
    world.answers[world.group.ready_ref(0)] = RoomFailed("the second engine did not start")
    world.group.replace(0)
    assert world.killed == [replica], "it is asked once"
    assert world.group.ready_ref(0) == (world.made[-1], "start")


@pytest.mark.parametrize("state", [{"dead": True}, {"hangs": True, "lost_engine": True}, {"lost_engine": False}])
def test_what_is_more_than_the_loss_of_an_engine_ends_the_actor(world: World, state: dict[str, bool]) -> None:
    replica = world.made[0]
    vars(replica).update(state)
    world.group.replace(0)
    assert world.killed == [replica]
    assert world.group.ready_ref(0) == (world.made[-1], "start")


def test_a_replica_that_was_killed_is_not_asked_what_it_lost(world: World) -> None:
    """On a lost node it would not answer."""
    replica = world.made[0]
    replica.lost_engine = True
    world.group.replace(0, died=True)
    assert world.killed == [replica]


def test_a_replica_that_never_started_is_started_anew(world: World) -> None:
    for spare in world.spares():
        world.prepare(spare)
    del world.answers[world.group.ready_ref(0)]
    world.group.replace(0)
    assert world.group.ready_ref(0) == (world.made[-1], "start")


def test_a_node_without_replicas_has_none(world: World) -> None:
    (spare,) = (spare for spare in world.spares() if spare.options["scheduling_strategy"] == "b")
    removed = world.made[1]
    world.group.remove(1)
    assert world.killed == [removed, spare]
    world.group.keep_spares()
    assert len(world.spares()) == 2, "no other is made there"


def test_one_that_is_still_starting_is_not_asked_to_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports, and would answer seconds later."""
    asked: list[Any] = []
    monkeypatch.setattr(group_module, "get_all", lambda refs, **_: asked.extend(refs))
    del world.answers[world.group.ready_ref(1)]
    world.group.stop()
    assert asked == [(world.made[0], "stop")]
    assert sorted(world.killed, key=id) == sorted(world.made, key=id)


def test_all_end_with_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "get_all", lambda *args, **options: None)
    world.group.stop()
    assert sorted(world.killed, key=id) == sorted(world.made, key=id)
