"""A run whose environment is an agent with OpenAI's own client."""

import os
from pathlib import Path

import pytest
from run_support import TINY, assert_bound_and_conservation, run_rl


@pytest.mark.long  # CI plays an agent in test_recipes.py
def test_an_agent_is_trained(tmp_path: Path) -> None:
    env = ["--env.id", "agent:talking_agent:play", "--model.max-seq-len", "128"]
    environ = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    flags = [*TINY, "--max-steps", "2", "--trainer.shards", "1", "--orchestrator.max-steps-off-policy", "0", *env]
    result = run_rl(tmp_path, *flags, environ=environ)
    assert result.code == 0, result.out
    assert len(result.rows) == 2
    assert_bound_and_conservation(result, bound=0)
    for row in result.rows:
        assert row["optim/grad_norm"] > 0
        assert row["optim/kl_sample_train_v2"] < 1e-4, "the tokens and their log-probabilities are those of the policy"
        turns, roots = row["env/all/session/turns"], row["env/all/session/roots"]
        assert (turns, roots, row["env/all/session/forks"]) == (3, 1, 1)
        assert row["env/all/session/undelivered"] == row["env/all/session/retries"] == 0
        assert 0 < row["env/all/letters"] <= 18
    result.assert_nothing_left()
