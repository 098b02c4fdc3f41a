"""Curves and ages of a run that is being written."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trireme.tools.curves import GroupAges, RunCurves, thinned


def row(step: int, value: float | None) -> str:
    return json.dumps({"step": step, "reward/total": value, "weights/digest": "x"}) + "\n"


def test_a_long_file_is_taken_in_over_several_looks(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(row(s, s / 10) for s in range(1000)))
    run_curves = RunCurves(tmp_path)
    run_curves.look(5000)
    assert 0 < run_curves.rows < 1000
    assert run_curves.unread > 0
    while run_curves.unread:
        run_curves.look(5000)
    assert run_curves.rows == 1000
    assert run_curves.panels()[0]["curves"][0]["points"][-1] == (1000, 99.9)
    assert len(run_curves.panels()[0]["curves"][0]["points"]) <= 800


def test_a_run_that_went_back_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(row(0, 0.1) + row(1, 0.2))
    (tmp_path / "trained.jsonl").write_text('{"step": 3, "groups": [{"floor": 1}]}\n{"step": 4, "examples": []}\n')
    run_curves, ages = RunCurves(tmp_path), GroupAges(tmp_path)
    run_curves.look()
    assert ages.look() == [(2, 1)]
    for name, text in (("metrics.jsonl", row(0, 0.3)), ("trained.jsonl", "")):
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(tmp_path / name)
    run_curves.look()
    assert run_curves.curve("reward/total") == [(1, 0.3)]
    assert ages.look() == []


def test_what_is_no_number_is_no_point(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(row(0, None) + row(1, 0.5) + '{"step": 2, "reward/total": NaN}\n')
    run_curves = RunCurves(tmp_path)
    run_curves.look()
    assert run_curves.names() == ["reward/total"]
    assert run_curves.curve("reward/total") == [(2, 0.5)]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=300), st.integers(1, 40))
def test_thinned_curves_keep_their_ends_and_extremes(values: list[float], buckets: int) -> None:
    points = list(enumerate(values))
    retained = thinned(points, buckets)
    assert len(retained) <= 2 * buckets + 2
    assert set(retained) <= set(points)
    assert retained == sorted(retained)
    if points:
        assert (retained[0], retained[-1]) == (points[0], points[-1])
        for extreme in (min, max):
            assert extreme(value for _, value in retained) == extreme(value for _, value in points)
