"""Which replicas serve while parts are lost, found and asked for. Actors and references are stand-ins."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from config_support import small
from ray.exceptions import ActorUnavailableError
from supervision_support import Room

from trireme.core.errors import BadInput, LimitReached, RoomFailed, TriremeError, WeightsRefused
from trireme.core.sampler import Heartbeat
from trireme.supervision import heartbeats as heartbeats_module
from trireme.supervision import replica_manager as manager_module
from trireme.supervision.heartbeats import HeartbeatMonitor
from trireme.supervision.replica_manager import ALIVE_S, ASLEEP, SECOND_OPINION_S, ReplicaManager
from trireme.supervision.restarts import Restarts
from trireme.supervision.roster import PartHealth, Roster, RunPart

HEARTBEAT_S, ENGINE_S = 30.0, 90.0


class World:
    """A manager of two replicas, its monitor and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, indices: list[int]) -> None:
        self.now, self.signals = 0.0, []
        self.pids: list[tuple[int, ...]] = []
        self.refused: TriremeError | None = None
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _s: None)
        monkeypatch.setattr(manager_module, "time", clock)
        monkeypatch.setattr(heartbeats_module, "time", clock)
        monkeypatch.setattr(heartbeats_module, "send", self._send)
        self.roster, self.room = Roster(lambda: self.now), Room(indices)
        places: Any = self.room
        self.monitor = HeartbeatMonitor(self.roster, HEARTBEAT_S, self._lost)
        config = small(inference={"replicas": len(indices)})
        self.restarts = Restarts(config.cluster.max_restarts, config.cluster.restart_window_s)
        self.manager = ReplicaManager(config, self.room, self.roster, self.monitor, self._again, places)
        self.manager.begin()

    def _send(self, parts: Sequence[RunPart], number: int) -> None:
        self.signals += [(part.name, number) for part in parts]
        self.pids += [part.pids for part in parts]

    def _lost(self, name: str, failure: TriremeError, died: bool) -> None:
        index = ReplicaManager.index_of(name)
        self.manager.lost(index, failure, died)

    def _again(self, part: str, failure: TriremeError, died: bool) -> None:
        if self.refused:
            raise self.refused
        self.restarts.take(part, failure, died=died, step=0, now=self.now)

    def dies(self, index: int, how: str) -> None:
        """Replica `index` dies, and its successor, if there is one, joins."""
        self.look(2.0)
        self.answer("heartbeat", index, value=RoomFailed(f"{how} of inference replica {index}"))
        if self.waits_for("start", index):
            self.answer("start", index)
            self.all_serve()

    def answer(self, *call: object, value: Any = None) -> None:
        refs = [ref for ref in self.monitor.refs() if ref.call[: len(call)] == call]
        assert refs, f"nobody waits for {call}: {list(self.monitor.refs())}"
        for ref in refs:
            self.monitor.arrived(ref, value)

    def all_serve(self) -> None:
        """A table says that all that joined serve."""
        self.answer("table", value=self.room.publish(*self.room.joined))

    def waits_for(self, *call: object) -> bool:
        return any(ref.call[: len(call)] == call for ref in self.monitor.refs())

    def set_cluster(self, **options: int) -> None:
        config = self.manager._config
        cluster = config.cluster.model_copy(update=options)
        self.manager._config = config.model_copy(update={"cluster": cluster})

    def look(self, for_s: float = 0.0) -> None:
        """Time passes, and it is looked once a second, as far as a thread that is awake does."""
        end = self.now + for_s
        while self.now < end - 1.0:
            self.now += 1.0
            self._look()
        self.now = end
        self._look()
        self.manager.look()

    def _look(self) -> None:
        if silent := self.monitor.look():
            heartbeats_module.kill(silent)
            self.monitor.end(silent)

    def serve(self) -> None:
        for index in self.room.indices:
            self.answer("start", index)
        self.manager.attach(self.room)
        self.all_serve()
        self.room.calls.clear()

    def health(self) -> dict[str, PartHealth]:
        return {part.name: part.health for part in self.roster.parts}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    return World(monkeypatch, [0, 1])


def spread(monkeypatch: pytest.MonkeyPatch, replicas: int) -> World:
    """Returns a world whose replicas serve, eight on a node."""
    world = World(monkeypatch, list(range(replicas)))
    world.serve()
    world.look()
    for index in range(replicas):
        world.answer("heartbeat", index, value=Heartbeat((index,), f"node-{index // 8}"))
    world.look(2.0)
    return world


DIED = RoomFailed("inference replica 1 died")


class TestStart:
    def test_a_replica_joins_when_it_and_the_orchestrator_are_there(self, world: World) -> None:
        world.answer("start", 0)
        assert world.room.calls == []
        world.manager.attach(world.room)
        world.answer("start", 1)
        assert world.room.calls == [("join", 0, "client 0"), ("join", 1, "client 1")]
        assert world.health() == {"inference_0": PartHealth.CATCHING_UP, "inference_1": PartHealth.CATCHING_UP}
        world.answer("table", value=world.room.publish(0))
        assert world.manager.missing(all_of_them=False) == []
        assert world.manager.missing(all_of_them=True) == ["inference replica 1"]

    def test_one_that_dies_as_it_starts_is_replaced(self, world: World) -> None:
        world.answer("start", 0, value=DIED)
        assert world.room.calls == [("replace", 0)]
        assert world.waits_for("start", 0)

    def test_bad_input_is_no_reason_to_try_again(self, world: World) -> None:
        with pytest.raises(BadInput, match="no such argument"):
            world.answer("start", 0, value=BadInput("no such argument"))

    def test_a_start_that_takes_too_long_is_given_up_but_waiting_for_a_place_is_not(self, world: World) -> None:
        world.room.lost_places = {1}
        world.look(601.0)
        assert world.room.calls == [("replace", 0)]
        world.look(601.0)
        assert ("replace", 1) not in world.room.calls
        part = world.roster.part("inference_1")
        assert "waits for a place" in part.why


class TestLoss:
    def test_the_orchestrator_is_told_a_successor_starts_and_joins(self, world: World) -> None:
        world.serve()
        world.look()
        world.answer("heartbeat", 1, value=DIED)
        assert world.room.calls == [("leave", 1), ("replace", 1)]
        assert world.health() == {"inference_0": PartHealth.HEALTHY, "inference_1": PartHealth.STARTING}
        world.answer("table", value=world.room.publish(0, 1))
        assert world.health()["inference_1"] is PartHealth.STARTING, "it speaks of the one that was lost"
        world.answer("start", 1)
        world.all_serve()
        assert world.health()["inference_1"] is PartHealth.HEALTHY
        assert [incident.part for incident in world.roster.incidents] == ["inference_1"] * 2
        world.manager.detach()
        world.manager.attach(world.room)
        world.all_serve()
        assert len(world.roster.incidents) == 2, "that it joins the next attempt too is no news"

    def test_an_attempt_has_nothing_to_do_with_a_loss_in_the_one_before(self, world: World) -> None:
        """In deterministic mode the loss of a replica that serves ends the attempt: once."""
        world.serve()
        assert world.manager.serves(0)
        world.manager.detach()
        assert not world.manager.serves(0)
        world.manager.lost(0, DIED, died=True)
        world.manager.attach(world.room)
        assert not world.manager.serves(0)
        world.answer("start", 0)
        world.all_serve()
        assert world.manager.serves(0)

    def test_actors_that_live_are_asked_together_what_they_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """128 replicas refuse one update. None that hangs holds up the others, or the thread."""
        world = World(monkeypatch, list(range(128)))
        world.serve()
        world.look()
        world.room.alive = set(range(128))
        for index in range(128):
            world.answer("heartbeat", index, value=WeightsRefused("canary"))
        assert world.room.questions == list(range(128))
        assert {name for name, *_ in world.room.calls} == {"leave"}
        world.answer("lost engine", 0, value=True)
        world.answer("lost engine", 1, value=False)
        world.answer("lost engine", 2, value=DIED)
        assert world.room.calls[-3:] == [("restart", 0), ("replace", 1), ("replace", 2)]
        world.manager.scale(127)
        assert not world.waits_for("lost engine", 127)
        world.look(ALIVE_S)
        assert [index for name, index in world.room.calls if name == "replace"] == list(range(1, 127))
        assert not world.waits_for("lost engine"), "what comes later says nothing of the successor"

    def test_places_of_all_that_start_are_looked_at_once_a_second(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = World(monkeypatch, list(range(128)))
        for _ in range(50):
            world.now += 0.2
            world.manager.look()
        assert 10 <= world.room.looks <= 11

    def test_a_silent_one_is_suspect_then_writes_its_stacks_and_is_killed(self, world: World) -> None:
        world.serve()
        world.room.alive = {0, 1}
        world.look()
        world.answer("heartbeat", value=Heartbeat((11, 12), "node"))
        world.look(1.5)
        world.answer("heartbeat", 0, value=Heartbeat((11, 12), "node"))
        world.look(HEARTBEAT_S / 3)
        assert world.health()["inference_1"] is PartHealth.SUSPECT
        assert world.signals == []
        world.answer("heartbeat", 1, value=Heartbeat((11, 12), "node"))
        assert world.health()["inference_1"] is PartHealth.HEALTHY
        world.look(1.5)
        world.look(HEARTBEAT_S)
        assert world.room.questions == [], "they were killed"
        assert world.signals[:2] == [("inference_0", heartbeats_module.STACKS), ("inference_0", 9)]
        assert set(world.pids) == {(11, 12)}, "its engine too"
        assert ("replace", 1) in world.room.calls

    def test_a_silent_engine_makes_its_replica_suspect_until_its_actor_gives_it_up(self, world: World) -> None:
        world.serve()
        world.look()
        world.answer("heartbeat", 1, value=Heartbeat((11, 12), "node", behind_s=ENGINE_S / 2, limit_s=ENGINE_S))
        assert world.health()["inference_1"] is PartHealth.SUSPECT
        world.look(2.0)
        assert world.room.calls == []
        world.answer("heartbeat", 1, value=RoomFailed("inference replica 1 has had no sign of life of its engine"))
        assert ("replace", 1) in world.room.calls

    def test_one_that_fails_again_and_again_is_left_out_and_tried_later(self, world: World) -> None:
        world.serve()
        for how in ("a crash", "a hang", "an error of its GPU", "a signal"):
            world.dies(1, how)
        assert world.health() == {"inference_0": PartHealth.HEALTHY}
        (incident,) = [left_out for left_out in world.roster.incidents if "is left out" in left_out.what]
        assert incident.part == "inference_1"
        assert "the run goes on with 1 replica, and tries another in 3600 s" in incident.what
        world.answer("heartbeat", 0, value=Heartbeat((7,), "node"))
        world.answer("table", value=world.room.publish(0, asleep=True))
        world.now += 3600.0
        world.manager.look()
        assert list(world.health()) == ["inference_0"], "while the others sleep the trainer has the memory"
        world.answer("table", value=world.room.publish(0))
        world.manager.look()
        world.answer("start", 2)
        world.all_serve()
        assert world.health() == {"inference_0": PartHealth.HEALTHY, "inference_2": PartHealth.HEALTHY}

    @pytest.mark.parametrize("reason", ["too few are left", "no restart is allowed"])
    def test_with_fewer_than_the_run_needs_it_ends(self, world: World, reason: str) -> None:
        if reason == "too few are left":
            for _ in range(3):
                world.restarts.take("inference replica 1", DIED, died=True, step=0, now=0.0)
            world.set_cluster(min_replicas=2)
        else:
            world.refused = DIED
            world.set_cluster(max_restarts=0)
        world.serve()
        world.look()
        with pytest.raises(RoomFailed if reason == "no restart is allowed" else LimitReached):
            world.answer("heartbeat", 1, value=DIED)
        assert world.health()["inference_1"] is PartHealth.DEAD

    def test_a_node_that_is_lost_whole_counts_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = spread(monkeypatch, 16)
        for index in range(8):
            world.answer("heartbeat", index, value=RoomFailed(f"inference replica {index} died"))
        assert [call for call in world.room.calls if call[0] == "replace"] == [("replace", index) for index in range(8)]

    def test_one_that_tables_leave_out_is_replaced_after_a_second_opinion(self, world: World) -> None:
        world.serve()
        for _ in range(2):
            world.answer("table", value=world.room.publish(0, lost={1: "it names weights it was never given"}))
            world.look()
            assert world.room.calls == []
            world.look(SECOND_OPINION_S / 2)
        assert world.room.calls == [("leave", 1), ("replace", 1)]
        world.answer("start", 1)
        world.answer("table", value=world.room.published)
        world.look(2 * SECOND_OPINION_S)
        assert world.health()["inference_1"] is PartHealth.CATCHING_UP, "the one before it is gone"

    def test_a_report_of_one_that_cannot_be_reached_waits_until_ray_knows(self, world: World) -> None:
        unreached = RoomFailed("unavailable")
        unreached.__cause__ = ActorUnavailableError("no connection", b"0" * 16)
        world.serve()
        world.look()
        world.answer("heartbeat", 1, value=unreached)
        world.answer("table", value=world.room.publish(0, lost={1: "it does not answer"}))
        world.look(2 * SECOND_OPINION_S)
        assert world.room.calls == []
        world.answer("heartbeat", 1, value=DIED)
        assert world.room.calls == [("leave", 1), ("replace", 1)]
        world.look(2 * SECOND_OPINION_S)
        assert world.room.calls == [("leave", 1), ("replace", 1)]

    def test_when_the_attempt_ends_meanwhile_the_replica_was_not_to_blame(self, world: World) -> None:
        world.serve()
        reason = "it could not fetch the weights of a dead trainer"
        world.answer("table", value=world.room.publish(0, lost={1: reason}))
        world.look(SECOND_OPINION_S / 2)
        world.manager.detach()
        assert world.room.calls == [("abort all",)]
        world.manager.attach(world.room)
        world.look(2 * SECOND_OPINION_S)
        assert world.health()["inference_1"] is PartHealth.CATCHING_UP
        assert world.room.calls[1:] == [("join", 0, "client 0"), ("join", 1, "client 1")]

    def test_a_late_table_of_an_earlier_attempt_says_nothing_of_this_one(self, world: World) -> None:
        world.answer("start", 0)
        world.answer("start", 1)
        world.manager.attach(world.room)
        for last in (world.room.publish(0, 1), RoomFailed("replica set died")):
            (late,) = [ref for ref in world.monitor.refs() if ref.call == ("table",)]
            world.manager.detach()
            world.manager.attach(next_set := Room([]))
            world.monitor.arrived(late, last)
            assert set(world.health().values()) == {PartHealth.CATCHING_UP}
        world.answer("table", value=next_set.publish(0, 1))
        world.look(2 * SECOND_OPINION_S)
        assert not any(call[0] == "replace" for call in world.room.calls)
        assert set(world.health().values()) == {PartHealth.HEALTHY}


class TestLostSet:
    def test_the_next_one_has_all_that_have_joined_and_drains_those_that_leave(self, world: World) -> None:
        world.serve()
        world.manager.scale(3)
        world.manager.scale(1)
        world.room.calls.clear()
        world.answer("table", value=world.room.publish(0, lost={0: "it could not fetch"}))
        generations = dict(world.room.joined)
        (late,) = [ref for ref in world.monitor.refs() if ref.call == ("table",)]
        world.manager.begin_set_again(world.room)
        assert world.room.calls == [("begin again", 0, 1), ("drain", 1)]
        assert world.room.joined == generations, "requests on them go on"
        world.monitor.arrived(late, RoomFailed("replica set died"))
        world.look(2 * SECOND_OPINION_S)
        assert ("replace", 0) not in world.room.calls, "the set that says so is no more"
        world.answer("table", value=world.room.publish(0))
        assert world.health()["inference_0"] is PartHealth.HEALTHY
        world.answer("table", value=world.room.publish(0, lost={1: "it was drained"}))
        world.look()
        assert "inference_1" not in world.health()


class TestScale:
    def test_more_start_and_join(self, world: World) -> None:
        world.serve()
        assert world.manager.scale(3) == "2 replicas; 1 more to start"
        assert world.room.calls == [("take",), ("add", 2)]
        world.answer("start", 2)
        assert world.room.calls[2:] == [("join", 2, "client 2")]

    def test_those_that_start_and_those_that_still_leave_count_at_once(self, world: World) -> None:
        def added(*numbers: int) -> tuple[int, ...]:
            return (world.manager.running, *map(world.manager.added, numbers))

        world.serve()
        assert added(2, 3) == (2, 0, 1)
        world.manager.scale(4)
        assert added(4, 5) == (4, 0, 1), "two are not up yet"
        world.answer("start")
        world.all_serve()
        world.manager.scale(1)
        assert added(1, 2) == (4, 0, 1), "three are still there"

    def test_the_youngest_leave_when_they_are_drained(self, world: World) -> None:
        world.serve()
        world.manager.scale(1)
        assert world.room.calls == [("drain", 1)]
        assert world.health()["inference_1"] is PartHealth.DRAINING
        world.answer("table", value=world.room.publish(0, 1))
        world.look()
        assert world.room.calls[1:] == []
        world.answer("table", value=world.room.publish(0, lost={1: "it was drained"}))
        world.look()
        assert world.room.calls[1:] == [("remove", 1), ("give back", 1)]
        assert world.health() == {"inference_0": PartHealth.HEALTHY}

    def test_one_that_dies_while_it_drains_has_no_successor(self, world: World) -> None:
        world.serve()
        world.look()
        world.manager.scale(1)
        world.answer("heartbeat", 1, value=DIED)
        assert world.room.calls == [("drain", 1), ("leave", 1), ("remove", 1), ("give back", 1)]

    def test_one_that_starts_leaves_at_once(self, world: World) -> None:
        world.answer("start", 0)
        world.manager.attach(world.room)
        world.manager.scale(1)
        assert ("remove", 1) in world.room.calls
        assert not world.waits_for("start", 1)

    def test_as_many_as_there_are(self, world: World) -> None:
        world.serve()
        assert world.manager.scale(2) == "there are 2 already"
        assert world.room.calls == []


@pytest.mark.parametrize("engine_alone", [False, True])
def test_one_that_dies_while_all_sleep_starts_again_when_they_wake(world: World, engine_alone: bool) -> None:
    """Until then the trainer has the memory that its engine needs."""
    world.serve()
    world.answer("table", value=world.room.publish(0, 1, asleep=True))
    world.look(1.0)
    assert {(part.health, part.why) for part in world.roster.parts} == {(PartHealth.HEALTHY, ASLEEP)}
    if engine_alone:
        world.room.alive.add(1)
    world.answer("heartbeat", 1, value=RoomFailed("the engine process died of inference replica 1"))
    if engine_alone:
        world.answer("lost engine", 1, value=True)
    world.look(5.0)
    assert world.room.calls == [("leave", 1)]
    assert world.health()["inference_1"] is PartHealth.STARTING
    world.answer("table", value=world.room.publish(0, lost={1: "it died"}))
    world.look(1.0)
    assert [part.why for part in world.roster.parts] == ["", ""]
    assert world.room.calls == [("leave", 1), ("restart" if engine_alone else "replace", 1)]
