"""A run whose environment is an agent with OpenAI's own client."""

import os
from pathlib import Path
from typing import Any

import pytest
from resume_support import comparable, contents, rows_of
from run_support import ROOT, TINY, Ended, assert_bound_and_conservation, run_rl

SUPPORT = [ROOT / "examples" / "agents", ROOT / "tests" / "unit" / "support"]
GAMES = [
    *("--deterministic", "--orchestrator.max-steps-off-policy", "0", "--max-steps", "3", "--renderer.name"),
    *("guessing:Bare", "--orchestrator.batch-size", "4", "--orchestrator.group-size", "4"),
]


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


def games(tmp_path: Path, env: str) -> Ended:
    environ = {"PYTHONPATH": os.pathsep.join([*map(str, SUPPORT), os.environ.get("PYTHONPATH", "")])}
    named = ["--env", f'[{{name = "game", {env}}}]']
    result = run_rl(tmp_path, *GAMES, *named, environ=environ, config=ROOT / "configs" / "guess.toml")
    assert result.code == 0, result.out
    return result


def outcome(result: Ended) -> list[Any]:
    """What was sampled, rewarded and trained; but for the counts that only sessions have."""
    rows = comparable(rows_of(result.root / "metrics.jsonl"))
    shared = [{name: value for name, value in row.items() if "/session/" not in name} for row in rows]
    commits = sorted((result.root / "checkpoints").iterdir())
    return [shared, comparable(rows_of(result.root / "trained.jsonl")), [contents(commit) for commit in commits]]


@pytest.mark.long
def test_in_deterministic_mode_an_agent_gives_the_run_of_the_environment_bit_for_bit(tmp_path: Path) -> None:
    """With real engines and shards. So tokens, log-probabilities and rewards are the same too: the weights are."""
    built_in = games(tmp_path / "built_in", 'id = "guess", args = {max_turns = 4, batch_size = 4}')
    agent = games(tmp_path / "agent", 'id = "agent:guessing_agent:play", args = {batch_size = 4}')
    for actual, expected in zip(outcome(agent), outcome(built_in), strict=True):
        assert actual == expected
    assert sum(row["env/game/session/turns"] for row in agent.rows) > 3, "it played, in sessions"
    assert any(0 < row["reward/total"] < 1 for row in agent.rows)
