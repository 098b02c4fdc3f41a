"""The supervisor informs the driver. Rooms and references are stand-ins; the thread is real."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from config_support import small
from ray.exceptions import ActorUnavailableError
from supervision_support import Ref, Room

from trireme.core.errors import BadInput, LimitReached, RoomFailed, TriremeError
from trireme.core.sampler import Heartbeat
from trireme.process import waits
from trireme.process.signals import Stopped
from trireme.supervision import heartbeats as heartbeats_module
from trireme.supervision import supervisor as supervisor_module
from trireme.supervision.roster import PartHealth, Roster, RunPart
from trireme.supervision.status import LOCK, ScaleRequests, request_scale
from trireme.supervision.supervisor import ElasticReplicas, Supervisor

DEADLINE_S = 20.0


class Trainer:
    def heartbeats(self) -> dict[str, Callable[[], Any]]:
        return {"trainer_0": lambda: Ref("trainer")}


class Orchestrator:
    def heartbeats(self) -> dict[str, Callable[[], Any]]:
        return {"orchestrator_0": lambda: Ref("orchestrator")}


class World:
    """A supervisor of `replicas`. Each reference comes to a Heartbeat unless `fails` says otherwise; in each table all
    that have joined serve."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, replicas: int = 1, **config: Any) -> None:
        self.fails: dict[str, TriremeError | type[Exception]] = {}
        self.silent: set[str] = set()
        monkeypatch.setattr(waits, "ready", self._ready)
        self.signals: list[str] = []
        self.unreachable = threading.Event()
        for module in (heartbeats_module, supervisor_module):
            monkeypatch.setattr(module, "send", self._send)
        cfg = small(orchestrator={"batch_size": 4, "max_steps_off_policy": 0}, **config)
        (root / LOCK).touch()
        self.supervised_config = cfg
        self.roster, self.room = Roster(time.time), Room(list(range(replicas)))
        places: Any = self.room
        self.check_number: Callable[[int, int], None] = lambda _number, _added: None
        checked = lambda number, added: self.check_number(number, added)  # noqa: E731
        elastic = ElasticReplicas(cfg, self.room, ScaleRequests(root), places, checked)
        self.supervisor = Supervisor(cfg, self.roster, "trainer and orchestrator", elastic)

    def _send(self, parts: Sequence[RunPart], _number: int) -> None:
        """Does not return while a node is unreachable: see `unreachable`."""
        self.signals += [part.name for part in parts]
        while self.unreachable.is_set():
            time.sleep(0.01)

    def _ready(self, refs: dict[Any, str], timeout_s: float) -> dict[Any, Any]:
        time.sleep(0.01)
        return {ref: self._outcome(ref) for ref in refs if ref.call[0] not in self.silent}

    def _outcome(self, ref: Ref) -> Any:
        failure = self.fails.get(str(ref.call[0]))
        if isinstance(failure, type):
            raise failure("out of the blue")
        if ref.call[0] == "table":
            return self.room.publish(*self.room.joined)
        return failure or Heartbeat((1,), "node")

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, (self.roster.parts, self.roster.incidents)
            time.sleep(0.01)

    @contextmanager
    def serving(self) -> Iterator[Supervisor]:
        """An attempt is under way, and its replica serves."""
        with self.supervisor as supervisor:
            self.begin()
            yield supervisor

    def begin(self) -> None:
        self.supervisor.expect(Trainer(), Orchestrator(), self.room)
        self.supervisor.attach(Trainer(), Orchestrator(), self.room, replica_set=self.room)
        self.supervisor.await_replicas(Path("logs"), lambda _names, _waited: None)

    def failure(self) -> TriremeError:
        failures: list[TriremeError] = []

        def raised() -> bool:
            try:
                self.supervisor.check()
            except TriremeError as failure:
                failures.append(failure)
            return bool(failures)

        self.until(raised)
        return failures[0]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path)


def test_a_signal_while_its_thread_starts_ends_the_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Thread.start` waits in Python until the thread runs, so a signal's handler may raise there."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise Stopped(130)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(Stopped), world.supervisor:
        pass
    assert "supervisor" not in {thread.name for thread in threading.enumerate()}


DIED = RoomFailed("trainer_0 died: process 7 was killed")


@pytest.mark.parametrize("failure", [BadInput("4 replicas need 48 GiB"), RoomFailed("4 nodes do not answer")])
def test_more_replicas_than_fit_are_refused_meanwhile(failure: TriremeError, world: World, tmp_path: Path) -> None:
    """Whoever is asked for the machines may take long: others get the supervisor's lock meanwhile."""
    requests: list[tuple[int, int]] = []

    def check(number: int, added: int) -> None:
        requests.append((number, added))
        assert world.supervisor._lock.acquire(timeout=DEADLINE_S)
        world.supervisor._lock.release()
        raise failure

    world.check_number = check
    with world.serving() as supervisor:
        with request_scale(tmp_path, 4) as answered, pytest.raises(BadInput, match=str(failure)):
            world.until(lambda: answered() is not None)
        assert requests == [(4, 3)]
        assert not any(call[0] in ("add", "take") for call in world.room.calls)
        supervisor.check()


def test_a_lost_shard_ends_the_attempt_and_the_next_one_begins_with_the_replicas_that_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(monkeypatch, tmp_path, cluster={"max_restarts": 1})
    with world.serving() as supervisor:
        world.fails["trainer"] = DIED
        assert world.failure() is DIED
        supervisor.detach(DIED)
        supervisor.may_rebuild(DIED)
        world.fails.clear()
        world.room.calls.clear()
        world.begin()
        supervisor.check()
        assert world.room.calls == [("join", 0, "client 0")]
        assert [part.restarts for part in world.roster.parts if part.name == "trainer_0"] == [1]
        world.fails["trainer"] = DIED
        assert world.failure() is DIED
        supervisor.detach(DIED)
        with pytest.raises(LimitReached, match="trainer and orchestrator failed 2 times"):
            supervisor.may_rebuild(DIED)


def test_a_lost_replica_set_has_a_successor_as_often_as_the_budget_allows(world: World) -> None:
    """It has all replicas, those that have left a table for too short a time too, and the attempt goes on."""
    with world.serving() as supervisor:
        for reason in ("it was killed", "it hangs", "it ran out of memory"):
            before = world.room.incarnation
            world.fails["replica set"] = RoomFailed(reason)
            world.until(lambda: world.room.incarnation > before)  # noqa: B023  it is called now
            world.fails.clear()
            world.until(lambda: all(part.health is PartHealth.HEALTHY for part in world.roster.parts))
            supervisor.check()
        assert world.room.calls == [("join", 0, "client 0"), *[("begin again", 0)] * 3]
        assert {part.name: part.restarts for part in world.roster.parts if part.restarts} == {"replica_set_0": 3}
        world.fails["replica set"] = RoomFailed("replica set died")
        assert "replica_set_0 failed 4 times" in str(world.failure())


def test_a_replica_set_that_is_lost_as_an_attempt_ends_has_no_successor(world: World) -> None:
    with world.serving() as supervisor:
        world.silent = {"start of the set"}
        world.fails["replica set"] = RoomFailed("replica set died")
        world.until(lambda: world.room.incarnation == 2)
        world.fails.clear()
        supervisor.detach(DIED)
        world.silent = set()
        world.begin()
        assert world.room.incarnation == 2
        supervisor.check()


@pytest.mark.parametrize("part", ["heartbeat", "replica set"])
def test_in_deterministic_mode_it_ends_the_attempt(part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch, tmp_path, deterministic=True)
    with world.serving():
        world.fails[part] = RoomFailed("it died")
        assert "it died" in str(world.failure())
        assert (("replace", 0) in world.room.calls) is (part == "heartbeat")


def test_an_error_that_a_room_raised_again_at_the_same_step_ends_the_run_with_it(world: World) -> None:
    bug = RoomFailed("trainer shard 0 raised ZeroDivisionError")
    with world.serving() as supervisor:
        supervisor.detach(bug)
        assert "trainer_0" in world.signals, "it may hang: where is it?"
        supervisor.may_rebuild(bug)
        world.begin()
        supervisor.detach(bug)
        with pytest.raises(RoomFailed, match="ZeroDivisionError") as raised:
            supervisor.may_rebuild(bug)
        assert raised.value is bug


def test_a_run_does_not_go_on_that_nobody_watches(world: World) -> None:
    with world.serving():
        world.fails["trainer"] = OSError
        assert "the supervisor of the run: OSError: out of the blue" in str(world.failure())


def test_a_silent_process_out_of_reach_holds_up_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch, tmp_path, timeouts={"heartbeat_s": 1.0})
    with world.serving() as supervisor:
        world.unreachable.set()
        world.silent = {"trainer"}
        world.until(lambda: "trainer_0" in world.signals)
        ended_attempt = threading.Event()

        def driver() -> None:
            supervisor.detach(None)
            ended_attempt.set()

        threading.Thread(target=driver, daemon=True).start()
        assert ended_attempt.wait(DEADLINE_S), "the driver ends the attempt meanwhile"
        world.unreachable.clear()


def test_when_the_run_ends_nobody_is_missed(world: World) -> None:
    with world.serving() as supervisor:
        supervisor.detach(None)
        world.fails |= {"trainer": DIED, "heartbeat": DIED}
        time.sleep(0.1)
        supervisor.check()
        assert world.roster.incidents == []


def unreached(name: str) -> RoomFailed:
    error = RoomFailed(f"{name} is unavailable")
    error.__cause__ = ActorUnavailableError("the node may be gone", None)
    return error


def test_nothing_is_built_again_before_ray_knows_who_is_dead(world: World) -> None:
    with world.serving() as supervisor:
        world.fails["trainer"] = unreached("trainer_0")
        ended_at: list[float] = []

        def tell() -> None:
            ended_at.append(time.monotonic())
            world.fails["trainer"] = DIED

        timer = threading.Timer(4.0, tell)
        timer.start()
        supervisor.detach(unreached("trainer_0"))
        timer.join()
        assert 0.0 <= time.monotonic() - ended_at[0] < 2.0, "it waits until it is known, and no longer"
        supervisor.may_rebuild(unreached("trainer_0"))
        assert [incident.what for incident in world.roster.incidents] == [str(DIED)]


def test_an_attempt_that_failed_though_everybody_lives_is_built_again_soon(world: World) -> None:
    with world.serving() as supervisor:
        started = time.monotonic()
        supervisor.detach(unreached("trainer_0"))
        assert time.monotonic() - started < 5.0
        supervisor.may_rebuild(unreached("trainer_0"))


def test_a_run_without_replicas_is_watched_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch, tmp_path)
    with Supervisor(world.supervised_config, world.roster, "the trainer") as supervisor:
        supervisor.expect(Trainer())
        supervisor.attach(Trainer())
        supervisor.check()
        world.fails["trainer"] = DIED
        world.until(lambda: bool(world.roster.incidents))
        with pytest.raises(RoomFailed, match="was killed"):
            supervisor.check()
        supervisor.detach(DIED)
        supervisor.may_rebuild(DIED)
        world.fails.clear()
        supervisor.expect(Trainer())
        supervisor.attach(Trainer())
        supervisor.goes_on()
    assert "the trainer" in [incident.part for incident in world.roster.incidents]
    assert [part.restarts for part in world.roster.parts] == [1]


def test_replicas_wait_for_a_place_longer_than_for_their_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch, tmp_path, timeouts={"start_s": 0.5})
    with world.serving() as supervisor:
        supervisor.detach(DIED)
        supervisor.may_rebuild(DIED)
        world.silent, world.room.lost_places = {"start"}, {0}
        world.fails["heartbeat"] = RoomFailed("inference_0 died")
        world.until(lambda: ("replace", 0) in world.room.calls)
        world.fails.clear()
        names_of_waits: list[str] = []

        def progress(names: list[str], waited_s: float) -> None:
            names_of_waits.extend(names)
            if waited_s > 1.0:
                world.room.lost_places, world.silent = set(), set()

        supervisor.expect(Trainer(), Orchestrator(), world.room)
        supervisor.attach(Trainer(), Orchestrator(), world.room, replica_set=world.room)
        supervisor.await_replicas(Path("logs"), progress)
        assert "a place in the cluster for inference replica 0" in names_of_waits
        supervisor.check()


def test_replicas_that_get_no_place_in_time_end_the_attempt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch, tmp_path, timeouts={"start_s": 60.0, "place_s": 0.3})
    world.silent, world.room.lost_places = {"start"}, {0}
    with (
        world.supervisor,
        pytest.raises(RoomFailed, match=r"a place in the cluster for inference replica 0 within .*timeouts\.place_s"),
    ):
        world.begin()
