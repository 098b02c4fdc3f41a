"""The quickstart learns: the command of the README, from start to end."""

from pathlib import Path
from statistics import mean

from run_support import run_rl

from trireme.errors import EXIT_OK


def test_the_reward_rises(tmp_path: Path) -> None:
    ended = run_rl(tmp_path)
    assert ended.code == EXIT_OK, ended.out
    rewards = [row["reward/total"] for row in ended.rows]
    assert mean(rewards[-10:]) - mean(rewards[:5]) >= 0.25
    assert max(row["off_policy/max"] for row in ended.rows) == 1
    ended.assert_nothing_left()
