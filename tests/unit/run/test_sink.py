"""Trackers get the steps of a run, and cannot delay them."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from waiting import wait_for

from trireme.process import faults
from trireme.run import sink as module
from trireme.run.sink import MetricsSink
from trireme.run.trackers import Table
from trireme.supervision.roster import Incident, Roster

Armed = Callable[[str], Path]


class Remembering:
    """A tracker that remembers all calls."""

    def __init__(self) -> None:
        self.place = "here"
        self.steps: list[int] = []
        self.incidents: list[str] = []
        self.closed = False

    def write(self, step: int, values: Mapping[str, float], rollouts: Table) -> None:
        self.steps.append(step - 1)

    def alert(self, incident: Incident) -> None:
        self.incidents.append(incident.part)

    def close(self) -> None:
        self.closed = True


class Fixture:
    """A sink `x`, its tracker, its roster, and the lines that it printed."""

    def __init__(self, connect: Callable[[], Remembering] | None = None) -> None:
        self.tracker = Remembering()
        self.lines: list[str] = []
        self.roster = Roster(lambda: 0.0)
        self.sink = MetricsSink("x", connect or (lambda: self.tracker), self.roster, self.lines.append)
        self.roster.listen(self.sink.alert)

    def write(self, count: int) -> None:
        for step in range(count):
            self.sink.write({"step": step}, [])

    @property
    def notes(self) -> list[str]:
        return [incident.what for incident in self.roster.incidents if incident.part == "x"]


def sink_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "sink of x"]


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Armed]:
    """Arms faults. Returns the file that exists while a thread is frozen. At the end thaws the thread, and waits until
    it has ended: it would pass the points that the next test arms."""
    reached = tmp_path / "reached"
    monkeypatch.setattr(faults, "_passed", Counter())
    monkeypatch.setenv("TRIREME_FAULT_REACHED", str(reached))

    def arm(spec: str) -> Path:
        monkeypatch.setenv("TRIREME_FAULTS", spec)
        return reached

    yield arm
    reached.unlink(missing_ok=True)
    wait_for(lambda: not sink_threads(), "the end of the sink's thread")


def test_a_tracker_gets_all_steps_and_incidents_in_order_and_is_closed() -> None:
    fixture = Fixture()
    fixture.write(500 % module.PENDING)
    fixture.roster.note("inference_1", "died")
    fixture.sink.close()
    assert fixture.tracker.steps == list(range(500 % module.PENDING))
    assert fixture.tracker.incidents == ["inference_1"]
    assert fixture.tracker.closed
    assert fixture.lines == ["here"]
    assert fixture.notes == []


@pytest.mark.parametrize("point", ["connect", "write"])
def test_a_tracker_that_hangs_delays_no_step(point: str, armed: Armed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PENDING", 5)
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    reached = armed(f"tracker.{point}.x=freeze")
    fixture = Fixture()
    fixture.write(1)
    wait_for(reached.exists, "the hang")
    fixture.write(20)  # returns although the thread hangs
    assert any("5 steps and incidents wait for it" in note for note in fixture.notes)
    fixture.sink.close()
    assert fixture.lines[-1].startswith("! x lacks 21 of 21 steps: no answer for 0.05 s at the end")
    reached.unlink()
    wait_for(lambda: not sink_threads(), "the end of the sink's thread")
    assert len(fixture.tracker.steps) <= 1, "after the hang nothing more is written"
    assert not fixture.tracker.closed


def test_a_tracker_that_is_silent_for_long_is_one_incident(armed: Armed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.0)
    reached = armed("tracker.write.x=freeze")
    fixture = Fixture()
    fixture.write(1)
    wait_for(reached.exists, "the hang")
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    fixture.write(3)
    assert [note for note in fixture.notes if "no answer" in note] == [
        "no answer for 0 s; steps go on, and wait for it here"
    ]
    fixture.sink.close()


def test_a_step_that_is_refused_is_dropped_and_later_ones_are_written(armed: Armed) -> None:
    armed("tracker.write.x@2=raise")
    fixture = Fixture()
    fixture.write(4)
    wait_for(lambda: fixture.notes, "the failure")
    fixture.sink.close()
    assert fixture.tracker.steps == [0, 2, 3]
    assert fixture.tracker.incidents == [], "its own failures are none of its business"
    assert fixture.notes == ["InjectedFault: fault injected at tracker.write.x, passage 2; steps go on without it"]
    assert fixture.lines[-1] == (
        "! x lacks 1 of 4 steps: InjectedFault: fault injected at tracker.write.x, passage 2. metrics.jsonl has all"
    )


def test_a_tracker_that_refuses_the_connection_is_tried_again(armed: Armed) -> None:
    armed("tracker.connect.x@1=raise,tracker.connect.x@2=raise")
    fixture = Fixture()
    fixture.write(3)
    fixture.sink.close()
    assert fixture.tracker.steps == [1, 2]
    assert fixture.tracker.closed
    assert fixture.lines[0] == "here"


def test_a_tracker_that_always_fails_makes_few_incidents(armed: Armed) -> None:
    armed("tracker.write.x@1+=raise")
    fixture = Fixture()
    fixture.write(100)
    fixture.sink.close()
    assert len(fixture.notes) == 7  # after 1, 2, 4, ... 64
    assert fixture.notes[-1].startswith("failure 64; ")


def test_a_tracker_that_does_not_close_is_told_at_the_end(armed: Armed) -> None:
    armed("tracker.close.x=raise")
    fixture = Fixture()
    fixture.write(1)
    fixture.sink.close()
    assert fixture.lines[-1].startswith("! x may lack the last steps: InjectedFault")


def test_a_secret_in_the_error_of_a_tracker_is_not_shown() -> None:
    key = "hf_" + "aB3" * 12

    def refuse() -> Remembering:
        raise ValueError(f"bad key {key}")

    fixture = Fixture(refuse)
    fixture.write(1)
    fixture.sink.close()
    assert key not in "".join([*fixture.lines, *fixture.notes])
    assert fixture.lines[-1].startswith("! x lacks 1 of 1 steps: ValueError: bad key")
