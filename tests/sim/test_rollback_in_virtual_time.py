"""The trainer dies, at any moment and again and again, and the run goes back to a checkpoint: the bound, conservation
and exactly once hold over every rollback, all tokens that are trained on are of weights that the trainer knows, every
environment is closed, and what the checkpoint has is kept."""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulation import Outcome, Scenario, simulate
from test_pipeline_in_virtual_time import ENDS, POLICIES, check_batch

GAMES = Scenario(turns=4, median=8, tool_s=4.0, steps=8, spread=1.0)


def check(outcome: Outcome) -> Outcome:
    """What the ledger says must agree with what was trained on. How often a problem was begun is no longer known from
    outside: what was dispatched after the checkpoint is forgotten, and comes again."""
    scenario, last = outcome.scenario, outcome.rows[-1]
    assert len(outcome.released) == len(outcome.minibatches) == scenario.steps
    for step, options in enumerate(outcome.options):
        check_batch(replace(outcome, scenario=options), step)
    for row in outcome.rows:
        assert row["ledger/dispatched"] == sum(row[f"ledger/{end}"] for end in ENDS)
    trained = [outcome.problems.number(g["problem"]) for released in outcome.released for g in released.trained]
    assert len(set(trained)) == len(trained) == last["ledger/trained"]
    otherwise = sum(last[f"ledger/{end}"] for end in ("filtered", "failed", "dropped", "active", "to_resample"))
    begun = last["ledger/dispatched"] - last["ledger/resampled"] + last["ledger/to_resample"]
    assert len(trained) + otherwise == begun
    assert set(trained) <= set(range(int(begun)))
    problems = outcome.problems
    assert all(problems.cleaned[n] >= times for n, times in problems.created.items()), "each group is cleaned up"
    return outcome


@pytest.mark.parametrize("max_steps_off_policy", [0, 1, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("commit_every", [1, 3])
@pytest.mark.parametrize("colocated", [False, True])
def test_no_rule_is_broken_when_the_trainer_dies(
    colocated: bool, policy: str, max_steps_off_policy: int, commit_every: int
) -> None:
    deaths = (7.0, 45.0, 90.0, 150.0)
    dying = replace(GAMES, policy=policy, max_steps_off_policy=max_steps_off_policy, trainer_dies_at_s=deaths)
    dying = replace(dying, colocated=colocated)
    outcome = check(simulate(replace(dying, commit_every=commit_every)))
    assert len(outcome.notes) == len(deaths)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draws a run whose trainer, replicas and options change at any time."""
    policies = st.sampled_from(POLICIES)
    bounds = st.integers(0, 4)
    batch_sizes = st.sampled_from([4, 8, 12])
    times = st.floats(0.0, 250.0)
    lost = draw(st.sampled_from(["dies_at_s", "hangs_at_s", "drains_at_s"]))
    options = {
        "policy": policies,
        "max_steps_off_policy": bounds,
        "batch_size": batch_sizes,
        "substeps": st.sampled_from([1, 2]),
        "minibatches": st.sampled_from([1, 2, "auto"]),
        "steps": st.integers(3, 8),
        "turns": st.sampled_from([1, 3]),
        "spread": st.sampled_from([0.0, 1.0, 1.6]),
        "says_state": st.booleans(),
        "colocated": st.booleans(),
        "tool_s": st.sampled_from([0.0, 4.0, 60.0]),
        "update_s": st.sampled_from([0.5, 12.0]),
        "train_s": st.sampled_from([0.0, 8.0, 100.0]),
        "slower": st.dictionaries(st.integers(0, 3), st.floats(1.0, 8.0), max_size=2),
        "acknowledges_late_s": st.dictionaries(st.integers(0, 3), st.floats(0.0, 60.0), max_size=2),
        lost: st.dictionaries(st.integers(0, 3), times, max_size=3),
        "joins_at_s": st.dictionaries(st.integers(4, 6), times, max_size=3),
        "max_concurrent": st.sampled_from([10, 1_000_000]),
        "constant": st.sampled_from([0, 3]),
        "failing": st.sampled_from([0, 5]),
        "commit_every": st.integers(1, 3),
        "trainer_dies_at_s": st.lists(times, max_size=4),
        "resumes_with": st.lists(
            st.fixed_dictionaries(
                {}, optional={"policy": policies, "max_steps_off_policy": bounds, "batch_size": batch_sizes}
            ),
            max_size=4,
        ),
    }
    return replace(GAMES, restart_s=5.0, patience_s=1000.0, **draw(st.fixed_dictionaries(options)))


@settings(deadline=None, max_examples=30, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(scenario=scenarios())
def test_whatever_happens_no_rule_is_broken(scenario: Scenario) -> None:
    check(simulate(scenario))


def test_a_checkpoint_gives_finished_rollouts_and_turns_of_environments_that_say_their_state() -> None:
    restored_by_kind = {}
    for says_state in (False, True):
        games = replace(GAMES, policy="wait", max_steps_off_policy=2, commit_every=3, says_state=says_state)
        quiet = simulate(games)
        outcome = check(simulate(replace(games, trainer_dies_at_s=[quiet.ended_s[4] + 3.0])))
        (note,) = outcome.notes
        restored, of, *words = note.split(maxsplit=3)
        assert (of, words[-1]) == ("of", "unfinished rollouts were kept")
        restored_by_kind[says_state] = int(restored)
        assert int(restored) <= int(words[0])
    assert restored_by_kind[False] < restored_by_kind[True]
