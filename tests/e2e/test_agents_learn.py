"""An agent learns: the guessing game of the examples, played through OpenAI's client."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import mean

import pytest
from run_support import ROOT, assert_bound_and_conservation, run_rl

AGENT = ["--env.id", "agent:guessing:play", "--renderer.name", "guessing:Bare"]
STEPS, LIMIT_S = 40, 1800.0


@pytest.mark.long
def test_the_guessing_game_is_learned_through_the_openai_client(tmp_path: Path) -> None:
    """The built-in environment has .41 in its first five steps and .54 in steps 26 to 50 with this seed."""
    environ = {"PYTHONPATH": os.pathsep.join([str(ROOT / "examples" / "agents"), os.environ.get("PYTHONPATH", "")])}
    flags = [*AGENT, "--max-steps", str(STEPS)]
    ended = run_rl(tmp_path, *flags, environ=environ, config=ROOT / "configs" / "guess.toml", limit_s=LIMIT_S)
    assert ended.code == 0, ended.out
    rewards = [row["reward/total"] for row in ended.rows]
    assert len(rewards) == STEPS
    assert mean(rewards[:5]) < 0.46
    assert mean(rewards[-10:]) > 0.51
    assert_bound_and_conservation(ended, bound=1)
    for row in ended.rows:
        assert row["env/all/session/undelivered"] == row["env/all/session/retokenised"] == 0
    ended.assert_nothing_left()
