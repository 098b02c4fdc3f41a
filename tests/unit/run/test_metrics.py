"""Rows: reduction, the clock, and the file they are read from."""

import errno
import io
import json
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from trireme.core.errors import StorageFailed
from trireme.process import faults
from trireme.run.metrics import Journal, evaluation_text, reduce_metrics, step_line


def test_each_name_is_reduced_by_its_suffix() -> None:
    parts = [
        {"a:sum": 1.0, "b:max": 5.0, "c:min": 2.0, "d:mean": 1.0},
        {"a:sum": 2.0, "b:max": 3.0, "c:min": 1.0, "d:mean": 2.0},
    ]
    assert reduce_metrics(parts) == {"a:sum": 3.0, "b:max": 5.0, "c:min": 1.0, "d:mean": 1.5}
    assert reduce_metrics([{"a:sum": 1.0}, {"b:mean": 4.0}]) == {"a:sum": 1.0, "b:mean": 4.0}
    with pytest.raises(KeyError):
        reduce_metrics([{"loss:median": 1.0}])


def test_means_are_over_the_loss_tokens_however_they_are_split() -> None:
    parts = [{"loss_tokens:sum": float(n), "d:mean": float(n)} for n in (1, 2, 3)]
    expected = {"loss_tokens:sum": 6.0, "d:mean": pytest.approx((1 + 4 + 9) / 6)}
    assert reduce_metrics(parts) == expected
    assert reduce_metrics([reduce_metrics(parts[:2]), parts[2]]) == expected
    assert reduce_metrics([*parts, {"loss_tokens:sum": 0.0, "d:mean": 9.0}]) == expected


def journal_of(root: Path, guard: Any = None, out: io.StringIO | None = None, line: Any = str) -> Journal:
    return Journal(root, line, out or io.StringIO(), [], guard or Mock())


def test_rows_are_whole_lines(tmp_path: Path) -> None:
    row = {"step": 0, "attempt": 1, "reward/total": 0.5}
    journal = journal_of(tmp_path)
    journal.write(row, {"groups": []})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == row  # before close
    assert json.loads((tmp_path / "trained.jsonl").read_text()) == {"step": 0, "attempt": 1, "groups": []}
    journal.write({"step": 1, "attempt": 1}, {"groups": []})
    journal.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [0, 1]


def test_what_is_no_number_is_null_in_rows(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    journal.write({"step": 0, "attempt": 1, "optim/grad_norm": float("nan"), "optim/ratio_max": float("inf")}, {})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert (row["optim/grad_norm"], row["optim/ratio_max"]) == (None, None)


@pytest.mark.parametrize("name", ["metrics.jsonl", "trained.jsonl"])
def test_a_row_without_room_is_written_later(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_passed", Counter())
    monkeypatch.setenv("TRIREME_FAULTS", f"row.{name}@2=full")
    guard = Mock()
    journal = journal_of(tmp_path, guard)
    for step in range(3):
        journal.write({"step": step, "attempt": 1}, {"groups": []}, ["{}"])
    journal.close()
    guard.make_room.assert_called_once()
    for file_name in ("metrics.jsonl", "trained.jsonl"):
        assert [json.loads(line)["step"] for line in (tmp_path / file_name).open()] == [0, 1, 2]


def test_rows_that_cannot_be_written_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_passed", Counter())
    monkeypatch.setenv("TRIREME_FAULTS", "row.metrics.jsonl@2+=full")
    guard, out = Mock(), io.StringIO()
    journal = journal_of(tmp_path, guard, out)
    journal.write({"step": 0, "attempt": 1}, {"groups": []})
    with pytest.raises(StorageFailed) as failed:
        journal.write({"step": 1, "attempt": 1}, {"groups": []})
    journal.close()
    guard.make_room.assert_called_once()
    text = str(failed.value)
    assert all(part in text for part in ("given: ", "No space left on device", "expected: ", "to do: make room"))
    assert len(out.getvalue().splitlines()) == 1, "a step without its row is not told as done"


def test_half_a_row_is_taken_back(tmp_path: Path) -> None:
    class Nearly:
        """A file in which only ten bytes fit at first."""

        def __init__(self, file: Any) -> None:
            self.file, self.remaining = file, 10

        def write(self, line: memoryview) -> int:
            if not self.remaining:
                self.remaining = sys.maxsize
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = self.file.write(line[: self.remaining])
            self.remaining -= min(self.remaining, written)
            return written

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    journal = journal_of(tmp_path)
    journal._files["metrics.jsonl"] = Nearly(journal._files["metrics.jsonl"])  # type: ignore[assignment]
    for step in range(2):
        journal.write({"step": step, "attempt": 1}, {"groups": []})
    journal.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [0, 1]


def evaluated(version: int, all_bad: float = 0.0, all_good: float = 0.0, failed: int = 0) -> dict[str, Any]:
    values = {"version": version, "n": 30, "failed": failed, "avg@2": 0.5, "avg@2/ci95": 0.125, "pass@2": 1.0}
    kinds = {"by_group/frac_all_bad": all_bad, "by_group/frac_all_good": all_good}
    return {f"eval/a/b/{name}": float(value) for name, value in (values | kinds).items()}


def test_an_evaluation_is_told_with_its_intervals_and_failures() -> None:
    assert not list(evaluation_text({"step": 3, "reward/total": 1.0}))
    (line,) = evaluation_text(evaluated(4, failed=10))
    assert line == (
        "  evaluation of version 4 on a/b: avg@2 0.500 +- 0.125, pass@2 1.000 +- 0.000, "
        "10 rollouts failed (25%) and count nowhere"
    )


@pytest.mark.parametrize(
    ("version", "all_bad", "all_good", "warns"),
    [(0, 1.0, 0.0, True), (0, 0.99, 0.0, False), (0, 0.1, 0.81, True), (0, 0.0, 0.8, False), (6, 1.0, 0.0, False)],
)
def test_a_start_that_solves_nothing_or_all_warns(version: int, all_bad: float, all_good: float, warns: bool) -> None:
    lines = list(evaluation_text(evaluated(version, all_bad, all_good)))
    assert ["warning" in line for line in lines[1:]] == [True] * warns


def test_the_console_tells_of_an_evaluation_below_its_step(tmp_path: Path) -> None:
    names = ("reward/total", "off_policy/mean", "off_policy/max", "optim/kl_sample_train_v2", "perf/tokens_per_s")
    times = ("step", "wait_for_batch", "forward_backward", "optim", "publish", "update_replicas")
    row = dict.fromkeys([*names, *(f"time/{name}" for name in times)], 0.0) | {"step": 6}
    out = io.StringIO()
    journal = journal_of(tmp_path, out=out, line=partial(step_line, max_steps=12))
    journal.write(row | evaluated(6) | {"attempt": 1}, {"groups": []})
    journal.close()
    first, second = out.getvalue().splitlines()
    assert first.startswith("step  7/12")
    assert "version 6" in second
