"""The real pipeline at the size of a large cluster, in virtual time."""

from __future__ import annotations

from simulation import Scenario, simulate
from test_pipeline_in_virtual_time import check

LARGE = Scenario(
    policy="requeue",
    max_steps_off_policy=1,
    batch_size=1250,
    group_size=8,
    steps=10,
    replicas=1000,
    slots=16,
    max_concurrent=16_000,
)


def test_a_thousand_replicas_and_a_hundred_thousand_rollouts() -> None:
    outcome = check(simulate(LARGE))
    assert len(outcome.trained_lengths) == 100_000
    assert sum(len(replica.lengths) > 0 for replica in outcome.replicas) == 1000
    assert outcome.rows[-1]["ledger/expired_running"] > 0, "stragglers are given up, and sampled afresh"
