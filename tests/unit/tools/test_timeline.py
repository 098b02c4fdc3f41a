"""Reading traces back selects the newest attempt, its newest steps, and rows, and never returns too many spans."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_support import SECOND, START, begin, counter, end, make_run, span, write_trace

from trireme.process import trace
from trireme.tools import timeline as module
from trireme.tools.timeline import Span, Timeline, Track, export_trace, json_lines, timeline, traces


def read(root: Path, steps: int = module.NEWEST_STEPS) -> Timeline:
    return timeline(root, steps)


def steps(root: Path, attempt: int, numbers: Sequence[int]) -> Path:
    """A driver that traced these steps, of one second each, one after the other."""
    spans = [
        event
        for at, number in enumerate(numbers)
        for event in (
            span("step", 0, at, at + 1, step=number),
            span("wait_for_batch", 0, at, at + 0.25),
            span("forward_backward", 0, at + 0.25, at + 0.9),
        )
    ]
    return write_trace(root, attempt, "driver_0", ["main"], spans)


def only(view: Timeline, process: str, track: str) -> Track:
    (one,) = [t for p in view.processes if p.name == process for t in p.tracks if t.name == track]
    return one


def test_one_file_for_all_processes_and_none_without_a_trace(tmp_path: Path) -> None:
    assert timeline(tmp_path) is None
    assert export_trace(tmp_path, tmp_path / "all.json") is None
    assert not (tmp_path / "all.json").exists()
    files = [steps(tmp_path, 1, range(2)), write_trace(tmp_path, 1, "trainer_0", ["main"], [span("optim", 0, 0, 1)])]
    assert export_trace(tmp_path, tmp_path / "all.json") == 1
    assert json.loads((tmp_path / "all.json").read_text()) == [e for file in files for e in json_lines(file)]


def test_what_the_tracer_writes(tmp_path: Path) -> None:
    for process in ("inference_0", "driver_0"):
        trace.start(tmp_path / "logs" / "attempt_3", process, 1)
        with trace.span("step", step=5), trace.span("update", "update", version=4), trace.life("group", 1):
            pass
        trace.stop()
    (tmp_path / "trace" / "attempt_3" / "all.json").write_text("[]")  # which somebody put there
    files = traces(tmp_path)
    assert [file.stem for file in files[3]] == ["driver_0", "inference_0"]
    assert read(tmp_path).traced == (6, 6), "as people count, from 1"


def test_steps_bound_what_is_shown_of_the_newest_attempt(tmp_path: Path) -> None:
    steps(tmp_path, 1, range(10))
    view = read(tmp_path, 3)
    assert (view.start, view.end) == (START + 7 * SECOND, START + 10 * SECOND)
    assert list(view.steps) == [8, 9, 10]
    assert view.traced == (1, 10)
    (row,) = only(view, "driver_0", "main").rows
    assert [s.name for s in row] == ["wait_for_batch", "forward_backward"] * 3
    steps(tmp_path, 2, range(4))
    assert read(tmp_path).attempt == 2
    write_trace(tmp_path, 10, "driver_0", ["main"], [])  # which has not finished a step
    view = read(tmp_path)
    assert (view.attempt, view.traced, view.steps) == (10, None, {})


def test_replicas_outlive_the_attempt_in_which_they_were_started(tmp_path: Path) -> None:
    steps(tmp_path, 1, [0, 1])
    write_trace(tmp_path, 1, "trainer_1", ["main"], [span("optim", 0, 1, 2)])
    spans = [span("sampling", 0, at, at + 1, version=at) for at in range(14)]
    write_trace(tmp_path, 1, "inference_0", ["sampling"], spans)
    write_trace(tmp_path, 1, "inference_1", ["sampling"], spans[:2])
    driver = [
        event for at in (10, 11) for event in (span("step", 0, at, at + 1, step=at), span("optim", 0, at, at + 1))
    ]
    write_trace(tmp_path, 2, "driver_0", ["main"], driver)
    second = read(tmp_path)
    assert (second.attempt, [p.name for p in second.processes]) == (2, ["driver_0", "inference_0"])
    assert [s.args["version"] for s in only(second, "inference_0", "sampling").rows[0]] == [10, 11, 12, 13]


def test_what_overlaps_takes_the_first_free_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = [begin(1, 0), begin(2, 1), end(1, 2), begin(3, 3), begin(4, 3.5), end(2, 4)]  # 3 and 4 are not over
    write_trace(tmp_path, 1, "orchestrator_0", [], lives)
    rows = only(read(tmp_path), "orchestrator_0", "group").rows
    assert [[(s.start - START) / SECOND for s in row] for row in rows] == [[0, 3], [1], [3.5]]
    assert [s.end is None for row in rows for s in row] == [False, True, False, True]
    monkeypatch.setattr(module, "MOST_ROWS", 3)
    write_trace(tmp_path, 2, "orchestrator_0", [], [begin(i, i) for i in range(5)])
    track = only(read(tmp_path), "orchestrator_0", "group")
    assert (len(track.rows), track.left_out) == (3, 2)


def test_counters_keep_their_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_POINTS", 10)
    points = [counter("sampling", i / 10, 7 if i == 33 else 1) for i in range(100)]
    write_trace(tmp_path, 1, "inference_0", [], points)
    (peaks,) = [p.counters["sampling"] for p in read(tmp_path).processes]
    assert len(peaks) == 10
    assert max(value for _, value in peaks) == 7


def test_a_trace_that_is_full_says_so(tmp_path: Path) -> None:
    file = steps(tmp_path, 1, range(2))
    write_trace(tmp_path, 1, "trainer_0", [], [])
    with file.open("a") as stream:
        stream.write("\n," + json.dumps({"ph": "i", "name": trace.FULL, "ts": START}))
    assert [(p.name, p.full) for p in read(tmp_path).processes] == [("driver_0", True), ("trainer_0", False)]


moments = st.integers(min_value=0, max_value=10_000)


@given(st.lists(st.tuples(moments, st.integers(min_value=1, max_value=500)), max_size=200), st.integers(1, 60))
def test_never_more_spans_than_the_bound(spans: list[tuple[int, int]], limit: int) -> None:
    """Whatever there is: the bound holds, the order stays, and nothing that is left out is longer than what stays."""
    row = [Span("a", start, start + length, {}) for start, length in sorted(spans)]
    process = module.Process("trainer_0", [Track("main", [list(row)])], {}, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_SPANS", limit)
        resolution = module._bound([process])
    ((shown,),) = [track.rows for track in process.tracks]
    assert len(shown) == min(limit, len(row))
    assert [span for span in row if any(span is one for one in shown)] == shown
    assert (resolution == 0) == (shown == row)
    left_out = [span for span in row if not any(span is one for one in shown)]
    assert all(module._length(span) <= resolution for span in left_out)
    assert all(module._length(span) >= resolution for span in shown)


def test_the_newest_steps_are_read_from_the_ends_of_long_traces(tmp_path: Path) -> None:
    """Names of tracks stand at the beginning, the last steps at the end, and what is between is not read."""
    root = make_run(tmp_path / "run", 0)
    events = [event for s in range(5000) for event in (span("step", 0, s, s + 1, step=s), span("optim", 0, s, s + 0.5))]
    file = write_trace(root, 1, "driver_0", ["main"], events)
    least = 80_000
    assert file.stat().st_size > 5 * least
    view = timeline(root, 3, least)
    assert sorted(view.steps) == [4998, 4999, 5000]
    (track,) = view.processes[0].tracks
    assert track.name == "main"
    assert [span.name for row in track.rows for span in row] == ["optim"] * 3
    assert view.processes == read(root, 3).processes, "as where all is read"
