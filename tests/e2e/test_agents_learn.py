"""An agent learns: the guessing game of the examples, played through OpenAI's client, beside the built-in one."""

import os
from pathlib import Path
from statistics import mean

import pytest
from run_support import ROOT, Ended, assert_bound_and_conservation, run_rl

AGENT = ["--env.id", "agent:guessing:play", "--renderer.name", "guessing:Bare"]
STEPS, SOME, LIMIT_S = 60, 15, 1500.0
SMALLER = [
    *("--orchestrator.batch-size", "8", "--orchestrator.group-size", "8", "--max-steps", str(STEPS)),
    *("--trainer.learning-rate", "5e-4"),
]
"""A quarter of the configuration's rollouts in a step, so half of its learning rate: with all of it a run may lose for
ten steps what it has learned."""
RISE, APART = 0.03, 0.05
"""A run that learns rises by .07 to .09, and one that does not would end as much below it. The last SOME steps of four
seeds had means between .492 and .511."""


def learned(tmp_path: Path, seed: int, *flags: str) -> tuple[float, float, Ended]:
    """Returns the mean reward of a run's first steps, that of its last ones, and the run."""
    environ = {"PYTHONPATH": os.pathsep.join([str(ROOT / "examples" / "agents"), os.environ.get("PYTHONPATH", "")])}
    flags = (*flags, *SMALLER, "--seed", str(seed))
    outcome = run_rl(tmp_path, *flags, environ=environ, config=ROOT / "configs" / "guess.toml", limit_s=LIMIT_S)
    assert outcome.code == 0, outcome.out
    rewards = [row["reward/total"] for row in outcome.rows]
    assert len(rewards) == STEPS
    print(f"seed {seed}, {flags[:2]}: {mean(rewards[:SOME]):.3f}, then {mean(rewards[-SOME:]):.3f}")
    return mean(rewards[:SOME]), mean(rewards[-SOME:]), outcome


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_guessing_game_is_learned_through_the_openai_client_as_built_in(tmp_path: Path, seed: int) -> None:
    first, last, outcome = learned(tmp_path / "agent", seed, *AGENT)
    built_in = learned(tmp_path / "built_in", seed)
    assert last > first + RISE
    assert last > built_in[1] - APART
    assert_bound_and_conservation(outcome, bound=1)
    for row in outcome.rows:
        assert row["env/all/session/undelivered"] == row["env/all/session/retokenised"] == 0
    outcome.assert_nothing_left()
