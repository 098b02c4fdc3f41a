"""The quickstart learns: the command of the README, whole, although it is killed in the middle and resumed. (40 of its
steps are always run, with more to look at: test_run.py.)"""

from pathlib import Path
from statistics import mean

import pytest
from resume_support import rows_of, run_and_kill
from run_support import Ended, assert_bound_and_conservation, run_rl

from trireme.core.errors import EXIT_OK


def assert_learned(outcome: Ended, steps: int = 150) -> list[float]:
    """Checks a whole quickstart of this many steps; returns the reward of each."""
    assert outcome.code == EXIT_OK, outcome.out
    assert [row["step"] for row in outcome.rows] == list(range(steps))
    rewards = [row["reward/total"] for row in outcome.rows]
    assert mean(rewards[-10:]) - mean(rewards[:5]) >= 0.25
    assert_bound_and_conservation(outcome, bound=1)
    problems = [group["problem"] for row in rows_of(outcome.root / "trained.jsonl") for group in row["groups"]]
    assert sorted(problems) == sorted(f"0.{n // 16}.{n % 16}" for n in range(steps * 16))
    outcome.assert_nothing_left()
    return rewards


@pytest.mark.long
def test_the_reward_rises_although_the_run_is_killed(tmp_path: Path) -> None:
    run_and_kill(tmp_path, [], at="orchestrator.release@70")
    rewards = assert_learned(run_rl(tmp_path, "--resume"))
    before, after = rewards[55:60], rewards[60:65]  # the newest checkpoint is of step 60: no drop, no jump
    assert abs(mean(after) - mean(before)) < 0.1
