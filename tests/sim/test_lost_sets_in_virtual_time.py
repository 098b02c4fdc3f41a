"""The replica set dies at each of its verbs, twice in a row, and routers miss tables or get old ones again: every rule
of the ledger holds, so no prompt is lost or sampled twice, and no group is older than the bound."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulation import SET_DEATHS, Scenario, simulate
from test_pipeline_in_virtual_time import POLICIES, check

CALM = Scenario(turns=2, median=10, steps=8, patience_s=1000.0)
VERBS: dict[str, dict[str, Any]] = {
    "update": {"set_dies_at_call": 3, "update_s": 3.0},
    "offer": {"set_dies_at_call": 3, "sessions": True, "fetch_s": 2.0},
    "sleep": {"set_dies_at_call": 2, "colocated": True},
    "join": {"joins_at_s": {4: 20.0}},
    "leave": {"hangs_at_s": {1: 15.0}, "restart_s": 4.0},
    "drain": {"drains_at_s": {0: 12.0}, "drain_s": 8.0},
    "report": {"dies_at_s": {0: 3.0}, "restart_s": 4.0},
}


@pytest.mark.parametrize("after_s", [0.0, 1.0])
@pytest.mark.parametrize("max_steps_off_policy", [0, 1, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verb", VERBS)
def test_no_rule_is_broken_when_the_set_dies_twice_at_a_verb(
    verb: str, policy: str, max_steps_off_policy: int, after_s: float
) -> None:
    options = {"policy": policy, "max_steps_off_policy": max_steps_off_policy, **VERBS[verb]}
    outcome = check(simulate(replace(CALM, set_dies_at=verb, set_dies_after_s=after_s, **options)))
    assert outcome.set_deaths == SET_DEATHS


@pytest.mark.parametrize("max_steps_off_policy", [0, 1, 4])
@pytest.mark.parametrize("at_s", [1.0, 20.0, 40.0])
def test_no_rule_is_broken_when_tables_come_late_or_not_at_all(at_s: float, max_steps_off_policy: int) -> None:
    scenario = replace(CALM, max_steps_off_policy=max_steps_off_policy, late_tables_at_s=(at_s, at_s + 15.0))
    check(simulate(replace(scenario, router_cut_at_s=(at_s + 5.0,), dies_at_s={0: at_s + 6.0}, restart_s=4.0)))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draws a run whose replicas, set and tables are lost at any time."""
    times = st.floats(0.0, 120.0)
    lost = draw(st.sampled_from(["dies_at_s", "hangs_at_s", "loses_engine_at_s", "drains_at_s"]))
    verb = draw(st.sampled_from(["", *VERBS]))
    options: Mapping[str, Any] = {
        "policy": st.sampled_from(POLICIES),
        "max_steps_off_policy": st.integers(0, 4),
        "colocated": st.booleans(),
        "sessions": st.booleans(),
        "fetch_s": st.sampled_from([0.0, 5.0]),
        "update_s": st.sampled_from([0.5, 12.0]),
        "train_s": st.sampled_from([0.0, 8.0]),
        "acknowledges_late_s": st.dictionaries(st.integers(0, 3), st.floats(0.0, 60.0), max_size=2),
        lost: st.dictionaries(st.integers(0, 3), times, max_size=2),
        "joins_at_s": st.dictionaries(st.integers(4, 6), times, max_size=2),
        "set_dies_at_call": st.integers(1, 4),
        "set_dies_after_s": st.floats(0.0, 20.0),
        "set_restart_s": st.floats(0.0, 20.0),
        "one_version": st.booleans(),
        "late_tables_at_s": st.lists(times, max_size=3),
        "router_cut_at_s": st.lists(times, max_size=1),
    }
    return replace(CALM, restart_s=5.0, set_dies_at=verb, **draw(st.fixed_dictionaries(dict(options))))


@settings(deadline=None, max_examples=30, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(scenario=scenarios())
def test_whatever_is_lost_no_rule_is_broken(scenario: Scenario) -> None:
    check(simulate(scenario))
