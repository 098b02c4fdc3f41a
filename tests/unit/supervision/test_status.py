"""STATUS, incidents.jsonl and requests to scale: what is written is what is read, whole, whatever happens."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from supervision_support import roster_of
from waiting import wait_for

from trireme.checkpoint.store import LOCK
from trireme.core.errors import LimitReached
from trireme.supervision import status as module
from trireme.supervision.roster import Incident, PartHealth, Roster, RunPart
from trireme.supervision.status import (
    INCIDENTS,
    STATUS,
    DriverProcess,
    RunEnd,
    ScaleRequest,
    ScaleRequests,
    Status,
    StatusWriter,
    read_incidents,
    request_scale,
)

RECOVERY = Path(__file__).parents[3] / "docs" / "recovery.md"


@pytest.fixture
def roster() -> Roster:
    return roster_of(PartHealth.HEALTHY, PartHealth.STARTING)


class TestStatus:
    def test_of_a_driver_that_lost_its_lock_nothing_is_written(self, tmp_path: Path, roster: Roster) -> None:
        (tmp_path / LOCK).write_text("pid 1 on a, start 1")
        with StatusWriter(tmp_path, roster):
            (tmp_path / LOCK).write_text("pid 2 on b, start 2")
            (tmp_path / STATUS).write_text("of the other driver")
            roster.note("trainer_0", "died")
        assert (tmp_path / STATUS).read_text() == "of the other driver"
        assert read_incidents(tmp_path) == []

    def test_what_is_read_is_what_the_roster_says(self, tmp_path: Path, roster: Roster) -> None:
        roster.attempt = 2
        roster.at_step(5)
        roster.note("inference_1", "its engine died")
        with StatusWriter(tmp_path, roster):
            wait_for((tmp_path / STATUS).exists, "the status")
            status = Status.read(tmp_path)
            assert (status.pid, status.node) == (os.getpid(), os.uname().nodename)
            assert (status.attempt, status.step, status.incidents_total, status.ended) == (2, 5, 1, None)
            assert status.parts == tuple(roster.parts)
            assert status.parts[0] == RunPart("inference_0", PartHealth.HEALTHY, 1.8e9, "", (100, 200), "here", 0)
            assert status.recent == tuple(roster.incidents)

    def test_a_reader_finds_it_whole(self, tmp_path: Path, roster: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "SHORTEST_S", 0.0)
        for n in range(200):
            roster.set(f"trainer_{n}", PartHealth.HEALTHY)
        with StatusWriter(tmp_path, roster):
            wait_for((tmp_path / STATUS).exists, "the status")
            for step in range(200):
                roster.at_step(step)
                assert len(json.loads((tmp_path / STATUS).read_bytes())["parts"]) == 202

    def test_the_end_and_why(self, tmp_path: Path, roster: Roster) -> None:
        with StatusWriter(tmp_path, roster):
            pass
        roster.note("inference_0", "stopped")
        assert Status.read(tmp_path).ended == RunEnd(0, "done"), "what comes later changes nothing, but is kept"
        assert [i.what for i in read_incidents(tmp_path)] == ["stopped"]
        with pytest.raises(LimitReached), StatusWriter(tmp_path, roster):
            raise LimitReached("inference_1 failed\n  4 times")
        assert Status.read(tmp_path).ended == RunEnd(3, "inference_1 failed 4 times")
        with pytest.raises(ZeroDivisionError), StatusWriter(tmp_path, roster):
            raise ZeroDivisionError
        assert Status.read(tmp_path).ended == RunEnd(1, "ZeroDivisionError")

    def test_nothing_and_torn(self, tmp_path: Path) -> None:
        assert Status.read(tmp_path) is None
        (tmp_path / STATUS).write_bytes(b'{"at": 1')
        assert Status.read(tmp_path) is None

    def test_a_full_disk_ends_no_run(self, tmp_path: Path, roster: Roster, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING), StatusWriter(tmp_path / "gone", roster):
            roster.note("inference_0", "died")
            roster.note("inference_0", "died")
        assert len([r for r in caplog.records if "cannot be written" in r.getMessage()]) == 1


def test_the_example_in_the_docs_is_a_status(tmp_path: Path) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", RECOVERY.read_text(), re.DOTALL)
    (tmp_path / STATUS).write_text(example)
    status = Status.read(tmp_path)
    assert status.parts[0].health is PartHealth.HEALTHY
    assert status.recent[0].part == status.parts[0].name
    assert json.loads(json.dumps(asdict(status))) == json.loads(example), "and has every field"


class TestIncidents:
    def test_all_of_all_attempts_are_kept_in_order(self, tmp_path: Path) -> None:
        for attempt in (1, 2):
            roster = roster_of(PartHealth.HEALTHY)
            roster.attempt = attempt
            with StatusWriter(tmp_path, roster):
                roster.note("inference_0", f"died in attempt {attempt}")
        first, second = read_incidents(tmp_path)
        assert first == Incident(1.8e9, "inference_0", "died in attempt 1", 0, 1)
        assert second.attempt == 2

    def test_a_torn_line_costs_only_itself(self, tmp_path: Path, roster: Roster) -> None:
        (tmp_path / INCIDENTS).write_text('{"at": 1.0, "part": "infer')
        with StatusWriter(tmp_path, roster):
            roster.note("inference_0", "died")
        assert [i.what for i in read_incidents(tmp_path)] == ["died"]

    def test_several_threads_write_whole_lines(self, tmp_path: Path, roster: Roster) -> None:
        with StatusWriter(tmp_path, roster), ThreadPoolExecutor(4) as pool:
            for _ in range(400):
                pool.submit(roster.note, "inference_0", "x" * 500)
        assert len(read_incidents(tmp_path)) == 400


def test_metrics_count_those_that_serve() -> None:
    roster = roster_of(*PartHealth, PartHealth.HEALTHY)
    roster.set("trainer_0", PartHealth.HEALTHY)
    roster.note("inference_2", "died")
    assert sum(part.serves for part in roster.parts) == 2
    assert roster.metrics() == {"perf/incidents": 1.0, "perf/replicas": 2.0}


class TestDriver:
    def test_a_killed_one_is_dead(self, tmp_path: Path) -> None:
        lock = tmp_path / LOCK
        code = f"import time; held = open({str(lock)!r}); print(flush=True); time.sleep(600)"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        lock.write_text(f"pid {process.pid} on {os.uname().nodename}\n")
        process.stdout.read(1)
        driver = DriverProcess.read(tmp_path)
        process.kill()
        process.wait()
        assert (driver, DriverProcess.read(tmp_path)) == (
            DriverProcess(process.pid, os.uname().nodename, True),
            DriverProcess(process.pid, os.uname().nodename, False),
        )


class TestScaleRequests:
    @pytest.fixture(autouse=True)
    def _lock(self, tmp_path: Path) -> None:
        (tmp_path / LOCK).write_text(f"pid {os.getpid()} on {os.uname().nodename}\n")

    def test_a_request_and_its_answer(self, tmp_path: Path) -> None:
        requests = ScaleRequests(tmp_path)
        assert requests.poll() is None
        with request_scale(tmp_path, 4) as answered:
            request = requests.poll()
            assert request.replicas == 4
            assert answered() is None
            requests.answer(request, "1 more to start")
            assert answered() == "1 more to start"
            assert requests.poll() is None, "it is answered"
        assert list((tmp_path / "scale").iterdir()) == []

    def test_the_oldest_comes_first_and_each_gets_its_own_answer(self, tmp_path: Path) -> None:
        requests = ScaleRequests(tmp_path)
        with request_scale(tmp_path, 4) as first, request_scale(tmp_path, 2) as second:
            for expected in (4, 2):
                request = requests.poll()
                assert request.replicas == expected
                requests.answer(request, f"{expected}")
            assert (first(), second()) == ("4", "2")

    def test_a_new_driver_does_nothing_that_an_older_one_was_asked(self, tmp_path: Path) -> None:
        (tmp_path / "scale").mkdir()
        old = tmp_path / "scale" / "0.json"
        old.write_text(json.dumps(vars(ScaleRequest("0", 1.0, "pid 1 on elsewhere\n", 7))))
        (tmp_path / "scale" / "0.answer").write_text("{}")
        later = time.time() + 3600
        os.utime(old, (later, later))  # the clock was set back since: it says nothing
        assert ScaleRequests(tmp_path).poll() is None
        assert list((tmp_path / "scale").iterdir()) == []

    def test_what_it_was_asked_before_it_looked_counts(self, tmp_path: Path) -> None:
        with request_scale(tmp_path, 5):
            request = ScaleRequests(tmp_path).poll()
            assert request.replicas == 5
