"""The real pipeline at the size of a large cluster, in virtual time."""

import pytest
from simulation import Scenario, simulate
from test_pipeline_in_virtual_time import check


@pytest.mark.long
def test_a_thousand_replicas_and_ten_thousand_rollouts_a_step() -> None:
    steps = 10
    large = Scenario(batch_size=1250, group_size=8, steps=steps, replicas=1000, slots=16, max_concurrent=16_000)
    outcome = check(simulate(large))
    assert len(outcome.trained_lengths) == 10_000 * steps
    assert sum(len(replica.lengths) > 0 for replica in outcome.replicas) == 1000
    assert outcome.waste == 0
