"""Who is killed for being silent, and who is not. Processes and references are stand-ins."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError

from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import Heartbeat
from trireme.supervision import heartbeats as module
from trireme.supervision.heartbeats import RECEIVER, HeartbeatMonitor
from trireme.supervision.roster import PartHealth, Roster

HEARTBEAT_S = 30.0


class Processes:
    """Some that answer, once a second, unless they are stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.now, self.stopped, self.killed, self.lost = 0.0, set[str](), list[str](), dict[str, TriremeError]()
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _s: None))
        monkeypatch.setattr(module, "send", self._send)
        self.roster = Roster(lambda: self.now)
        self.watch = HeartbeatMonitor(
            self.roster, HEARTBEAT_S, 90.0, lambda name, failure, _died: self.lost.update({name: failure})
        )
        for name in names:
            self.roster.set(name, PartHealth.HEALTHY)
            self.watch.add(name, object)

    def _send(self, part: object, _pids: object, number: int) -> None:
        if number == signal.SIGKILL:
            self.killed.append(part.name)  # type: ignore[attr-defined]

    def live(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.watch.look()
            for ref, name in self.watch.refs().items():
                if name not in self.stopped:
                    self.watch.arrived(ref, Heartbeat((1,), "node"))

    def health(self, name: str) -> PartHealth:
        part = self.roster.part(name)
        assert part is not None
        return part.health


def test_who_answers_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch, "trainer_0", RECEIVER)
    processes.live(200)
    assert processes.killed == []


def test_who_is_silent_is_suspect_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch, "trainer_0", "inference_0", RECEIVER)
    processes.stopped = {"inference_0"}
    processes.live(15)
    assert processes.health("inference_0") is PartHealth.SUSPECT
    assert processes.killed == []
    processes.live(20)
    assert processes.killed == ["inference_0"]
    assert "heartbeat_s = 30" in str(processes.lost["inference_0"])
    assert isinstance(processes.lost["inference_0"], RoomFailed)


def test_who_answers_in_time_is_well_again(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch, "inference_0", RECEIVER)
    processes.stopped = {"inference_0"}
    processes.live(25)
    processes.stopped = set()
    processes.live(20)
    assert (processes.killed, processes.health("inference_0")) == ([], PartHealth.HEALTHY)


def test_replicas_that_wait_for_a_stopped_orchestrator_are_not_killed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them was asked first."""
    for names in (("inference_0", RECEIVER, "inference_1"), (RECEIVER, "inference_0", "inference_1")):
        processes = Processes(monkeypatch, *names)
        processes.stopped = set(names)
        processes.live(33)
        assert processes.killed == [RECEIVER]
        processes.live(20)
        processes.stopped = set()
        processes.live(60)
        assert processes.killed == [RECEIVER]
        assert processes.health("inference_0") is PartHealth.HEALTHY


def test_they_get_their_time_once_only(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch, "inference_0", RECEIVER)
    processes.stopped = {"inference_0", RECEIVER}
    processes.live(70)
    assert processes.killed == [RECEIVER, "inference_0"]


def test_who_cannot_be_reached_is_asked_again_until_ray_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process on a lost node Ray says first that it is unavailable, and after some seconds that it died."""
    unreached, died = RoomFailed("unavailable"), RoomFailed("died")
    unreached.__cause__ = ActorUnavailableError("no connection", b"0" * 16)
    processes = Processes(monkeypatch, "inference_0", RECEIVER)
    processes.stopped = {"inference_0"}
    for seconds in range(12):
        processes.live(1)
        for ref in [ref for ref, name in processes.watch.refs().items() if name == "inference_0"]:
            processes.watch.arrived(ref, unreached if seconds < 11 else died)
    assert processes.lost == {"inference_0": died}
    assert processes.killed == []
