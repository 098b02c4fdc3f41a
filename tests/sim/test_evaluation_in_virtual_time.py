"""Evaluation and training share replicas for hours of virtual time: neither keeps the other from going on."""

from dataclasses import replace

import pytest
from simulation import Outcome, Scenario, simulate
from test_pipeline_in_virtual_time import check

EVERY_FOURTH = {"every": 4, "problems": 60, "samples": 4}
BUSY = Scenario(steps=16, train_s=2.0, replicas=2, slots=16, evaluation=EVERY_FOURTH)
"""Replicas are what is scarce: 32 places for an evaluation of 240 rollouts and batches of 32."""


def evaluations(outcome: Outcome) -> dict[int, dict[str, float]]:
    """The rows that hold one, by their steps; each has all of its rollouts."""
    rows = {step: row for step, row in enumerate(outcome.rows) if "eval/sim/version" in row}
    assert all((row["eval/sim/n"], row["eval/sim/failed"]) == (240, 0) for row in rows.values())
    return rows


def versions(evaluated: dict[int, dict[str, float]]) -> dict[int, float]:
    return {step: row["eval/sim/version"] for step, row in evaluated.items()}


@pytest.mark.parametrize(("max_steps_off_policy", "limit"), [(0, "auto"), (1, 24), (3, 24)])
def test_neither_starves_the_other(max_steps_off_policy: int, limit: int | str) -> None:
    busy = replace(BUSY, max_steps_off_policy=max_steps_off_policy, max_concurrent=limit)
    both, plain = check(simulate(busy)), simulate(replace(busy, evaluation={}))
    evaluated = evaluations(both)
    assert versions(evaluated) == {0: 0, 4: 4, 8: 8, 12: 12, 15: 16}
    seconds = {step: row["perf/evaluation_s"] for step, row in evaluated.items()}
    alone = seconds[15]  # nothing is left to train on
    assert max(seconds.values()) < 2 * alone, "it comes to half of the room"
    assert both.seconds < plain.seconds + sum(seconds.values()), "training goes on beside it"


@pytest.mark.parametrize("loss", ["dies_at_s", "hangs_at_s"])
@pytest.mark.parametrize("at_s", [3.0, 20.0, 60.0])
def test_an_evaluation_outlives_its_replicas_and_has_one_version(loss: str, at_s: float) -> None:
    """At 3 s the first one is under way. No request is in flight at both losses: it would be refused."""
    lossy = replace(BUSY, max_concurrent=24, restart_s=5.0, patience_s=60.0, **{loss: {0: at_s, 1: at_s + 60.0}})
    evaluated = evaluations(check(simulate(lossy)))
    assert versions(evaluated) == {0: 0, 4: 4, 8: 8, 12: 12, 15: 16}
