"""Replicas that join while a run trains: the steps continue as if nothing happened."""

from dataclasses import replace

import numpy as np
import pytest
from simulation import Outcome, Scenario, simulate
from test_pipeline_in_virtual_time import check

FROM_ONE_TO_33 = range(1, 33)


def steps_of(outcome: Outcome) -> list[float]:
    """Returns the seconds of each step after the first."""
    return np.diff(outcome.ended_s).tolist()


@pytest.mark.parametrize("apart_s", [0.0, 3.0])
@pytest.mark.parametrize("update_s", [20.0, 60.0])
def test_from_1_to_33_replicas_no_step_waits_for_more_than_one_update(update_s: float, apart_s: float) -> None:
    alone = Scenario("wait", 2, batch_size=16, group_size=2, steps=16, replicas=1)
    alone = replace(alone, update_s=update_s, update_deadline_s=300.0)
    joins = {index: 150.0 + apart_s * index for index in FROM_ONE_TO_33}
    outcome = check(simulate(replace(alone, joins_at_s=joins)))
    longest_s, usual_s = max(steps_of(outcome)), max(steps_of(simulate(alone)))
    assert longest_s <= usual_s + update_s
    assert all(replica.tokens for replica in outcome.replicas), "all of them sample"
    assert len(outcome.replicas) == 33
