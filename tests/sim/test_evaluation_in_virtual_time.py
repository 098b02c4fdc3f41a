"""Evaluation and training share replicas for hours of virtual time: neither keeps the other from going on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation import Scenario, simulate
from test_pipeline_in_virtual_time import check

EVERY_FOURTH = {"every": 4, "problems": 60, "samples": 4}
BUSY = Scenario(steps=16, train_s=2.0, replicas=2, slots=16, evaluation=EVERY_FOURTH)
"""Replicas are what is scarce: 32 places for an evaluation of 240 rollouts and batches of 32."""


@pytest.mark.parametrize(("max_age", "limit"), [(0, "auto"), (1, 24), (3, 24)])
def test_neither_starves_the_other(max_age: int, limit: int | str) -> None:
    busy = replace(BUSY, max_age=max_age, max_concurrent=limit)
    both, plain = check(simulate(busy)), simulate(replace(busy, evaluation={}))
    evaluated = {step: row for step, row in enumerate(both.rows) if "eval/sim/version" in row}
    assert {step: row["eval/sim/version"] for step, row in evaluated.items()} == {0: 0, 4: 4, 8: 8, 12: 12, 15: 16}
    assert all((row["eval/sim/n"], row["eval/sim/failed"]) == (240, 0) for row in evaluated.values())
    seconds = {step: row["perf/evaluation_s"] for step, row in evaluated.items()}
    alone = seconds[15]  # nothing is left to train on
    assert max(seconds.values()) < 2 * alone, "it comes to half of the room"
    assert both.seconds < plain.seconds + sum(seconds.values()), "training goes on beside it"
