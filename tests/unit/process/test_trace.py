"""The trace of a process: what a viewer, or a program, reads from its file."""

import errno
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.process import trace
from trireme.run.metrics import Clock

LOGS = Path("run") / "logs" / "attempt_1"
FILE = Path("run") / "trace" / "attempt_1" / "trainer_0.json"


@pytest.fixture(autouse=True)
def _stopped() -> Iterator[None]:
    yield
    trace.stop()


def start(place: Path, max_mb: int = 1) -> Path:
    trace.start(place / LOGS, "trainer_0", max_mb)
    return place / FILE


def events(file: Path) -> list[dict[str, Any]]:
    """All of a file, by a JSON parser, once the array is closed."""
    return json.loads(file.read_text() + "]")


def named(file: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in events(file) if event["name"] == name]


def test_viewers_show_spans_by_name_on_the_systems_clock(tmp_path: Path) -> None:
    file = start(tmp_path)
    before = time.time_ns() // 1000
    with trace.span("publish", version=3):
        time.sleep(0.002)
    after = time.time_ns() // 1000
    with trace.span("fetch", "update"), trace.span("forward_backward"):
        pass
    trace.stop()
    (span,) = named(file, "publish")
    assert (span["ph"], span["args"]) == ("X", {"version": 3})
    assert before - 50 <= span["ts"] <= span["ts"] + span["dur"] <= after + 50
    assert span["dur"] >= 2000
    (process,) = named(file, "process_name")
    threads = {event["args"]["name"]: event["tid"] for event in named(file, "thread_name")}
    assert process["args"] == {"name": "trainer_0"}
    assert {event["pid"] for event in events(file)} == {process["pid"]}
    for name, track in (("fetch", "update"), ("forward_backward", "main")):
        assert [event["tid"] for event in named(file, name)] == [threads[track]]


@settings(max_examples=30, deadline=None)
@given(
    st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=3), max_leaves=20),
    st.text(),
    st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5), max_size=2),
)
def test_spans_nest(tmp_path_factory: pytest.TempPathFactory, tree: list[Any], name: str, args: dict[str, Any]) -> None:
    def run(children: list[Any], path: str) -> None:
        with trace.span(f"{path}/{name}", "main", **{f"_{key}": value for key, value in args.items()}):
            for i, child in enumerate(children):
                run(child, f"{path}{i}")

    file = start(tmp_path_factory.mktemp("run"))
    run(tree, "/")
    trace.stop()
    spans = {event["name"].removesuffix(f"/{name}"): event for event in events(file) if event["ph"] == "X"}
    for path, span in spans.items():
        assert span.get("args", {}) == {f"_{key}": value for key, value in args.items()}
        if path != "/":
            outer = spans[path[:-1]]
            assert outer["ts"] <= span["ts"]
            assert span["ts"] + span["dur"] <= outer["ts"] + outer["dur"]


def test_lives_and_the_clock_of_a_step_are_traced(tmp_path: Path) -> None:
    file = start(tmp_path)
    with trace.life("group", 17, problem="p") as ending:
        ending["versions"] = [3, 4]
    clock = Clock()
    with clock("step", step=7):
        assert list(clock.timed("wait_for_batch", iter([1]))) == [1]
    trace.stop()
    begin, end = named(file, "group")
    assert (begin["ph"], begin["id"], begin["cat"], begin["args"]) == ("b", 17, "group", {"problem": "p"})
    assert (end["ph"], end["id"], end["cat"], end["args"]) == ("e", 17, "group", {"versions": [3, 4]})
    assert set(clock.seconds) == {"step", "wait_for_batch"}
    assert [event["args"] for event in named(file, "step")] == [{"step": 7}]
    assert len(named(file, "wait_for_batch")) == 2  # for the item, and for the end


@settings(max_examples=20, deadline=None)
@given(st.integers(min_value=1500, max_value=20_000), st.integers(min_value=0, max_value=200))
def test_a_full_file_says_so_and_ends(tmp_path_factory: pytest.TempPathFactory, limit: int, spans: int) -> None:
    file = tmp_path_factory.mktemp("run") / "trainer_0.json"
    writer = trace.TraceWriter(file, limit)
    for number in range(spans):
        writer.add_span("forward_backward", "main", {"number": number}, number, number + 1)
    writer.close()
    assert file.stat().st_size <= limit
    written = named(file, "forward_backward")
    assert [span["args"]["number"] for span in written] == list(range(len(written)))
    assert len(written) < spans or events(file)[-1]["name"] != trace.FULL
    assert len(written) == spans or events(file)[-1]["name"] == trace.FULL
    assert len(written) == spans or file.stat().st_size > limit - 2 * trace.LAST_LINE_BYTES


@pytest.mark.parametrize(("logs", "max_mb"), [(LOGS, 0), (None, 1)])
def test_off(tmp_path: Path, logs: Path | None, max_mb: int) -> None:
    trace.start(logs and tmp_path / logs, "trainer_0", max_mb)
    busy = trace.Busy("sampling")
    with trace.span("optim"), trace.overlapping("step", "environment"), trace.life("group", 1) as ending, busy:
        ending["versions"] = [1]
    trace.stop()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys, time
from pathlib import Path
from trireme.process import trace
trace.start(Path(sys.argv[1]), "trainer_0", 1)
with trace.life("group", 5):
    with trace.span("forward_backward"):
        pass
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_all_but_the_last_second(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / LOGS)])
    assert process.returncode == -signal.SIGKILL
    assert len(named(tmp_path / FILE, "forward_backward")) == 1
    assert [event["ph"] for event in named(tmp_path / FILE, "group")] == ["b"]


def test_a_process_that_follows_another_goes_on_in_its_file(tmp_path: Path) -> None:
    file = start(tmp_path)
    with trace.span("one"):
        pass
    trace.stop()
    with file.open("a") as torn:
        torn.write('\n,{"ph":"X","na')
    start(tmp_path)
    with trace.span("two"):
        pass
    trace.stop()
    lines = file.read_text().splitlines()
    assert {json.loads(line[1:])["name"] for line in lines if line.endswith("}")} >= {"one", "two"}
    assert [line for line in lines if not line.endswith("}")] == [',{"ph":"X","na']


def test_a_trace_that_cannot_be_written_ends_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).symlink_to(full)
    with caplog.at_level(logging.WARNING):
        start(tmp_path)
        for _ in range(3):
            with trace.span("optim"):
                time.sleep(1.5 * trace.WRITE_EVERY_S)
        trace.stop()
    (warning,) = caplog.messages
    assert "the run continues" in warning
    assert str(tmp_path / FILE) in warning
    assert f"[Errno {errno.ENOSPC}]" in warning
