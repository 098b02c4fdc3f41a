"""Inputs and expected numbers of other projects' tests of advantages (tests/conformance/numbers.toml)."""

from __future__ import annotations

import pytest

from orchestrator.advantages import AdvantageKind, compute_advantages


@pytest.mark.parametrize(
    ("kind", "rewards", "expected"),
    [
        ("leave_one_out", [6.0, 3.0], [3.0, -3.0]),
        ("leave_one_out", [9.0, 12.0], [-3.0, 3.0]),
        ("mean", [6.0, 3.0], [1.5, -1.5]),
        ("mean", [9.0, 12.0], [-1.5, 1.5]),
        ("mean", [0.7], [0.0]),
        ("mean", [1.0, 1.0], [0.0, 0.0]),
        ("mean", [0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_advantages(kind: AdvantageKind, rewards: list[float], expected: list[float]) -> None:
    assert compute_advantages(rewards, kind).tolist() == pytest.approx(expected, abs=1e-5)


def test_the_mean_of_advantages_is_zero() -> None:
    assert sum(compute_advantages([1.0, 0.5, 0.8], "mean")) == pytest.approx(0.0, abs=1e-6)
