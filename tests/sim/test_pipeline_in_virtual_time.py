"""The real pipeline over hours of virtual time: whoever is slow, late or dead, no rule of the ledger is broken.

Every outcome goes through `check`, which knows nothing of the ledger but its metrics: what was dispatched, cleaned up
and trained on is counted by the environments, the replicas and the trainer.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulation import LAST, SHARE, Outcome, Scenario, simulate

from inference.router import MOST_LOSSES
from trireme.core.errors import RoomFailed

POLICIES = ["wait", "drop"]
ENDS = ("trained", "in_training", "filtered", "resampled", "dropped", "failed", "active")


def check(outcome: Outcome) -> Outcome:
    scenario = outcome.scenario
    assert len(outcome.released) == len(outcome.minibatches) == scenario.steps
    for step in range(scenario.steps):
        check_batch(outcome, step)
    for row in outcome.rows:
        assert row["ledger/dispatched"] == sum(row[f"ledger/{end}"] for end in ENDS)
    check_problems(outcome)
    return outcome


def check_batch(outcome: Outcome, step: int) -> None:
    """A batch has its size, each rollout once, no group beyond the bound, and tokens of the versions that it says."""
    scenario, minibatches = outcome.scenario, outcome.minibatches[step]
    if scenario.minibatches == "auto":
        assert sum(minibatch.last for minibatch in minibatches) == scenario.substeps
    else:
        assert len(minibatches) == scenario.substeps * scenario.minibatches
    rollouts = []
    for minibatch in minibatches:
        batch, floors_D = minibatch.batch, minibatch.provenance.floors
        starts = batch.offsets[:-1]
        rollouts += list(zip(batch.tokens[starts].tolist(), batch.tokens[starts + 1].tolist(), strict=True))
        assert (step - scenario.max_steps_off_policy <= floors_D).all()
        assert (floors_D <= step).all()
        versions, floors = batch.columns["versions"], np.repeat(floors_D, batch.lengths)
        sampled = versions >= 0
        assert (floors[sampled] <= versions[sampled]).all()
        assert (versions[sampled] <= step).all()
        places = np.arange(len(versions)) - np.repeat(starts, batch.lengths) + 1
        ends = sampled & ~np.append(sampled[1:], False)
        tokens = (SHARE * places + versions + LAST * ends)[sampled]
        assert (batch.columns["target_tokens"][sampled] == tokens).all(), "each token once, in its place"
        assert (batch.columns["logprobs"][sampled] == -tokens.astype(np.float32)).all()
    problems = [outcome.problems.number(group["problem"]) for group in outcome.released[step].trained]
    assert len(problems) == scenario.batch_size
    expected = {(p, sample) for p in problems for sample in range(scenario.group_size)}
    assert len(set(rollouts)) == len(rollouts)
    assert set(rollouts) <= expected
    assert len(expected) - len(rollouts) <= refused(outcome)


def check_problems(outcome: Outcome) -> None:
    """Each problem that was begun ended exactly once, or is still under way."""
    scenario, created, last = outcome.scenario, outcome.problems.created, outcome.rows[-1]
    counts = {name.removeprefix("ledger/"): int(n) for name, n in last.items() if name.startswith("ledger/")}
    trained = [outcome.problems.number(g["problem"]) for released in outcome.released for g in released.trained]
    assert len(set(trained)) == len(trained) == counts["trained"] == scenario.steps * scenario.batch_size
    assert sorted(created) == list(range(len(created))), "the dataset is gone through in order"
    assert outcome.problems.cleaned == created
    assert created.total() == counts["dispatched"]
    assert max(created.values()) == 1, "nothing is sampled twice"
    under_way = counts["active"]
    assert len(created) == len(trained) + counts["filtered"] + counts["failed"] + counts["dropped"] + under_way
    assert sum(row["off_policy/expired_running"] for row in outcome.rows) == counts["expired_running"]
    unusable = {n for n in created if is_multiple(n, scenario.failing) or is_multiple(n, scenario.constant)}
    assert not unusable & set(trained)
    failed = refused(outcome)
    assert counts["filtered"] + counts["failed"] <= len(unusable) + failed
    assert len(set(created) - set(trained) - unusable) <= counts["dropped"] + under_way + failed, "nothing else is lost"


def refused(outcome: Outcome) -> int:
    """Returns the number of rollouts with a request that was in flight at two losses: the router does not try it again.
    Without two losses there is none."""
    if outcome.scenario.losses < MOST_LOSSES:
        return 0
    return sum(int(row.get("rollout_errors/BadRequest", 0)) for row in outcome.rows)


def is_multiple(number: int, divisor: int) -> bool:
    return divisor > 0 and number % divisor == 0


TROUBLES: dict[str, dict[str, Any]] = {
    "long tails": {},
    "a slow replica": {"slower": {1: 6.0}},
    "one replica alone, overloaded": {"replicas": 1, "slots": 8},
    "a late acknowledgement": {"acknowledges_late_s": {2: 20.0}},
    "updates longer than a step": {"update_s": 30.0},
    "a trainer that waits for nobody": {"train_s": 0.0, "publish_s": 0.0},
    "a slow trainer": {"train_s": 200.0},
    "streaming, two substeps": {"substeps": 2, "minibatches": 2},
    "streaming what has finished": {"minibatches": "auto"},
    "few at once": {"max_concurrent": 10},
    "as many at once as the replicas can take": {"max_concurrent": "auto", "slots": 4},
    "failures and groups of equal rewards": {"failing": 5, "constant": 3},
    "three turns": {"turns": 3, "median": 8},
}
TROUBLES["everything at once"] = {"minibatches": 2, "turns": 2, "median": 10}
for trouble_of_all in ("a slow replica", "a late acknowledgement", "failures and groups of equal rewards"):
    TROUBLES["everything at once"] |= TROUBLES[trouble_of_all]


@pytest.mark.parametrize("max_steps_off_policy", [0, 1, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
def test_no_rule_is_broken(trouble: Mapping[str, Any], policy: str, max_steps_off_policy: int) -> None:
    outcome = check(simulate(Scenario(policy=policy, max_steps_off_policy=max_steps_off_policy, **trouble)))
    ages = [row["off_policy/max"] for row in outcome.rows]
    assert max(ages) > 0 or max_steps_off_policy == 0, "the bound is put to the test"


@pytest.mark.parametrize("max_steps_off_policy", [0, 1, 4])
@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
def test_no_rule_is_broken_where_trainer_and_replicas_take_turns(
    trouble: Mapping[str, Any], max_steps_off_policy: int
) -> None:
    outcome = check(simulate(Scenario(max_steps_off_policy=max_steps_off_policy, colocated=True, **trouble)))
    assert max(row["off_policy/max"] for row in outcome.rows) == max_steps_off_policy
    assert outcome.rows[-1]["ledger/dropped"] == 0
    assert sum(row.get("weights/reprefill_tokens", 0) for row in outcome.rows) == 0


@pytest.mark.parametrize("max_steps_off_policy", [0, 1, 4])
@pytest.mark.parametrize("at_s", [7.0, 25.0, 40.0, 55.0, 70.0])
def test_a_replica_that_is_lost_in_either_phase_is_replaced(at_s: float, max_steps_off_policy: int) -> None:
    scenario = Scenario(
        max_steps_off_policy=max_steps_off_policy,
        colocated=True,
        restart_s=20.0,
        patience_s=60.0,
        dies_at_s={0: at_s},
        evaluation={"every": 3, "problems": 4, "samples": 2},
    )
    check(simulate(scenario))


LOSSES: dict[str, dict[str, Any]] = {
    "one dies, another joins": {"dies_at_s": {0: 6.0}, "joins_at_s": {4: 20.0, 5: 33.0}},
    "one hangs": {"hangs_at_s": {1: 15.0}, "restart_s": 4.0},
    "one loses its engine": {"loses_engine_at_s": {1: 15.0}, "restart_s": 4.0},
    "one dies, and no answer has two versions": {"dies_at_s": {1: 15.0}, "restart_s": 4.0, "one_version": True},
    "one hangs in its first update": {"hangs_at_s": {1: 0.2}, "restart_s": 4.0},
    "two leave in order": {"drains_at_s": {0: 12.0, 3: 25.0}},
    "two leave, three come": {"drains_at_s": {0: 12.0, 3: 25.0}, "joins_at_s": {4: 11.0, 5: 13.0, 6: 30.0}},
    "each dies in turn": {"dies_at_s": {0: 5.0, 1: 9.0, 2: 21.0, 3: 30.0}, "restart_s": 7.0},
    "all die at once": {"dies_at_s": dict.fromkeys(range(4), 15.0), "restart_s": 20.0, "patience_s": 60.0},
    "the only one dies": {"replicas": 1, "dies_at_s": {0: 15.0}, "restart_s": 20.0, "patience_s": 60.0},
    "the only one dies in an update": {"replicas": 1, "dies_at_s": {0: 0.2}, "restart_s": 20.0, "patience_s": 60.0},
    "one dies in its first update": {"update_s": 3.0, "dies_at_s": {2: 1.0, 0: 30.0}, "restart_s": 5.0},
}


@pytest.mark.parametrize(("policy", "max_steps_off_policy"), [("wait", 0), ("wait", 2), ("drop", 1)])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_no_rule_is_broken_as_replicas_change(loss: Mapping[str, Any], policy: str, max_steps_off_policy: int) -> None:
    outcome = check(
        simulate(
            Scenario(policy=policy, max_steps_off_policy=max_steps_off_policy, turns=2, median=10, steps=8, **loss)
        )
    )
    joined = outcome.replicas[outcome.scenario.replicas :]
    assert not joined or any(replica.lengths for replica in joined), "who joined has sampled"


def test_nothing_is_lost_but_the_last_second_of_a_dead_replica() -> None:
    """`wait` trains on all that was dispatched, so whatever else was sampled was sampled in vain."""
    scenario = Scenario(policy="wait", max_steps_off_policy=0, dies_at_s={0: 15.0})
    waste = simulate(scenario).sampled_tokens - simulate(replace(scenario, dies_at_s={})).sampled_tokens
    assert 0 <= waste <= scenario.slots / scenario.token_s


def test_a_drained_replica_hands_over_all_that_it_has() -> None:
    scenario = Scenario(policy="wait", max_steps_off_policy=0, drains_at_s={0: 15.0}, drain_s=0.0)
    assert simulate(scenario).waste == 0


@pytest.mark.parametrize("at_s", [0.2, 15.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_without_replicas_the_run_ends_with_their_names(policy: str, at_s: float) -> None:
    with pytest.raises(RoomFailed, match="no inference replica is left: simulated replica 0 died; simulated replica 1"):
        simulate(Scenario(policy=policy, replicas=2, dies_at_s={0: at_s, 1: at_s}))


def test_without_a_successor_patience_ends() -> None:
    with pytest.raises(RoomFailed, match="is left, and none joined within 30 s: simulated replica 0 died"):
        simulate(Scenario(policy="wait", replicas=1, dies_at_s={0: 15.0}, patience_s=30.0))


def test_waiting_is_never_biased_and_wastes_nothing() -> None:
    outcome = simulate(Scenario(policy="wait", max_steps_off_policy=2))
    assert (outcome.waste, outcome.length_bias) == (0, 1)


def test_asynchrony_pays() -> None:
    """The same work takes less virtual time the older the groups may be; how much is in docs/asynchrony.md."""
    seconds = [
        simulate(Scenario(policy="wait", max_steps_off_policy=max_steps_off_policy)).seconds
        for max_steps_off_policy in (0, 1, 4)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_waste_is_counted_by_cause_and_no_token_twice() -> None:
    """Of a rollout that is given up while it runs, whole answers count, so that the answers in flight are left out."""
    outcome = check(simulate(Scenario(policy="drop", failing=5, constant=3, turns=2, median=10)))
    wasted = {
        name: sum(row[f"waste/{name}"] for row in outcome.rows)
        for name in ("expired_running", "expired_finished", "filtered", "failed")
    }
    assert min(wasted["expired_running"], wasted["filtered"], wasted["failed"]) > 0
    counted = sum(wasted.values()) + outcome.trained_tokens
    assert 0.75 * outcome.sampled_tokens < counted < outcome.sampled_tokens
