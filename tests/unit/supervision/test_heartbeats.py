"""Silent processes are killed, and others are not. Processes and references are stand-ins."""

import signal
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError

from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import Heartbeat
from trireme.supervision import heartbeats as module
from trireme.supervision.heartbeats import EVERY_S, HeartbeatMonitor
from trireme.supervision.roster import PartHealth, Roster

HEARTBEAT_S = 30.0
REACH_S = 5.0


class Processes:
    """Some that answer, once a second, unless they are stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.now, self.stopped, self.killed, self.lost = 0.0, set[str](), list[str](), dict[str, TriremeError]()
        self.unreachable = False
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _s: None))
        self.sends = 0
        monkeypatch.setattr(module, "signal_processes", self._send)
        self.roster = Roster(lambda: self.now)
        self.monitor = HeartbeatMonitor(
            self.roster, HEARTBEAT_S, lambda name, failure, _died: self.lost.update({name: failure})
        )
        for number, name in enumerate(names, 1):
            self.roster.set(name, PartHealth.HEALTHY, pids=(number,), node=f"node {number}")
            self.monitor.add(name, object)

    def _send(self, pids: Mapping[str, Sequence[int]], number: int) -> None:
        """Takes as long as it may where no node answers."""
        self.sends += 1
        if self.unreachable:
            self.now += REACH_S
        if number == signal.SIGKILL:
            names = {part.pids[0]: part.name for part in self.roster.parts if part.pids}
            self.killed += [names[pid] for those in pids.values() for pid in those]

    def live(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self._look()
            for ref, name in self.monitor.refs().items():
                if name not in self.stopped:
                    part = self.roster.part(name)
                    self.monitor.arrived(ref, Heartbeat(part.pids, part.node))

    def _look(self) -> None:
        if silent := self.monitor.look():
            module.kill(silent)
            self.monitor.end(silent)

    def look(self, now: float) -> list[str]:
        """The names of those that have been asked, and have not answered, after a look at that time."""
        self.now = now
        self._look()
        return list(self.monitor.refs().values())

    def answer(self, name: str, outcome: object = Heartbeat((1,), "node")) -> None:
        for ref in [ref for ref, owner in self.monitor.refs().items() if owner == name]:
            self.monitor.arrived(ref, outcome)

    def health(self, name: str) -> PartHealth:
        return self.roster.part(name).health


def test_replicas_are_judged_while_the_orchestrator_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch, "inference_0", "orchestrator_0", "inference_1")
    processes.stopped = {"inference_0", "orchestrator_0"}
    processes.live(33)
    assert processes.killed == ["inference_0", "orchestrator_0"]
    assert "heartbeat_s = 30" in str(processes.lost["inference_0"])


def test_who_cannot_be_reached_is_asked_again_until_ray_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray first calls a process on a lost node unavailable, and after some seconds dead."""
    unreached, died = unavailable(), RoomFailed("died")
    processes = Processes(monkeypatch, "inference_0", "orchestrator_0")
    processes.stopped = {"inference_0"}
    for seconds in range(12):
        processes.live(1)
        for ref in [ref for ref, name in processes.monitor.refs().items() if name == "inference_0"]:
            processes.monitor.arrived(ref, unreached if seconds < 11 else died)
    assert processes.lost == {"inference_0": died}
    assert processes.killed == []


def test_hundreds_of_silent_processes_cost_no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"trainer_{n}" for n in range(256)]
    processes = Processes(monkeypatch, *names)
    processes.live(3)
    processes.stopped, processes.unreachable, stopped_at = set(names), True, processes.now
    while len(processes.lost) < len(names):
        processes.live(1)
    assert processes.killed == names
    assert processes.now - stopped_at - HEARTBEAT_S < 30
    assert processes.sends == 2, "their stacks, and their end"


def test_one_that_is_dropped_while_it_is_killed_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch, "trainer_0")
    processes.stopped = {"trainer_0"}
    silent = []
    while not silent:
        processes.now += 1.0
        silent = processes.monitor.look()
    assert processes.monitor.look() == [], "once"
    processes.monitor.drop("trainer_0")
    processes.monitor.add("trainer_0", object)
    processes.monitor.end(silent)
    assert processes.lost == {}


def test_a_process_that_has_not_answered_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch, "a")
    assert processes.look(0.0) == ["a"]
    assert processes.look(10.0) == ["a"]
    processes.answer("a")
    assert processes.look(10.0 + EVERY_S / 2) == []
    assert processes.look(10.0 + EVERY_S) == ["a"]


def test_silence_counts_from_the_request_that_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch, "a", "b")
    processes.look(5.0)
    processes.now = 6.0
    processes.answer("b")
    for second in range(7, 15):
        processes.look(float(second))
        assert processes.health("a") is PartHealth.HEALTHY
    processes.look(15.0)
    assert (processes.health("a"), processes.health("b")) == (PartHealth.SUSPECT, PartHealth.HEALTHY)
    assert "answered nothing for 10 s" in processes.roster.parts[0].why


def test_a_monitor_that_was_stopped_itself_does_not_blame_others_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process was stopped, or its machine: the answers are there, it has only not looked yet."""
    processes = Processes(monkeypatch, "a")
    for now in (1.0, 3600.0, 3601.0, 3602.0):
        processes.look(now)
        assert processes.health("a") is PartHealth.HEALTHY
    processes.look(3603.0)
    assert processes.health("a") is PartHealth.SUSPECT, "it does answer nothing"


def test_a_successor_is_not_blamed_and_no_process_is_after_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch, "a")
    processes.look(0.0)
    processes.monitor.add("a", object)
    for now in (6.0, 12.0):
        processes.look(now)
        assert processes.health("a") is PartHealth.HEALTHY
    late = list(processes.monitor.refs())
    processes.monitor.drop("a")
    for ref in late:
        processes.monitor.arrived(ref, Heartbeat((1,), "node"))
    assert processes.look(500.0) == []
    assert processes.health("a") is PartHealth.HEALTHY


def unavailable() -> RoomFailed:
    """Returns the error of a call to a process on a lost node, until Ray has given up the node."""
    failure = RoomFailed("unavailable")
    failure.__cause__ = ActorUnavailableError("no connection", b"0" * 16)
    return failure
