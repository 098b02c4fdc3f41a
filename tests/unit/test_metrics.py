"""Rows: reduction, the clock, and the file they are read from."""

import json
from pathlib import Path

import pytest

from trireme.metrics import Clock, JsonlSink, reduce_metrics


def test_each_name_is_reduced_by_its_suffix() -> None:
    parts = [
        {"a:sum": 1.0, "b:max": 5.0, "c:min": 2.0, "d:mean": 1.0},
        {"a:sum": 2.0, "b:max": 3.0, "c:min": 1.0, "d:mean": 2.0},
    ]
    assert reduce_metrics(parts) == {"a:sum": 3.0, "b:max": 5.0, "c:min": 1.0, "d:mean": 1.5}


def test_a_part_may_lack_a_name() -> None:
    assert reduce_metrics([{"a:sum": 1.0}, {"b:mean": 4.0}]) == {"a:sum": 1.0, "b:mean": 4.0}


def test_an_unknown_reduction_is_an_error() -> None:
    with pytest.raises(KeyError):
        reduce_metrics([{"loss:median": 1.0}])


def test_the_clock_counts_only_the_wait_for_items() -> None:
    clock = Clock()
    assert list(clock.timed("wait", iter([1, 2, 3]))) == [1, 2, 3]
    assert set(clock.seconds) == {"wait"}


def test_rows_are_whole_lines(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write({"step": 0, "reward/total": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "reward/total": 0.5}  # before close
    sink.write({"step": 1})
    sink.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [0, 1]
