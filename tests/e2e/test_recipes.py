"""The recipes of examples/recipes in their small form: three steps on made rows.

One run plays the environments of all four recipes; a long test runs each file of its own.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from largest import make
from recipe_support import DIRECTORY, ROWS, env_of, make_tiny_model, small_flags
from run_support import Ended, assert_bound_and_conservation, run_rl

from trireme.core.errors import EXIT_OK

ENVIRONMENTS = ("gsm8k", "math", "apps", "search")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_model(directory)
    return str(directory)


def trained(tmp_path: Path, *flags: str, bound: int = 2) -> Ended:
    result = run_rl(tmp_path, *flags, "--run.output-dir", str(tmp_path), "--run.name", "run", directory=False)
    assert result.code == EXIT_OK, result.out
    assert [row["step"] for row in result.rows] == [0, 1, 2]
    assert_bound_and_conservation(result, bound)
    result.assert_nothing_left()
    return result


def test_the_environments_of_all_recipes_are_played(model: str, tmp_path: Path) -> None:
    """Eight problems are drawn for a step, which include some of each environment. With the bound of 0 a step trains on
    these eight: with a larger one the quick environments' later groups can take the places of a slow one's. Adapters
    are trained, and the log-probabilities are those of the policy, of the search agent's turns too."""
    recipes = ("gsm8k", "math-4b-lora", "apps", "search")
    envs = f"[{', '.join(env_of(recipe, tmp_path) for recipe in recipes)}]"
    flags = [*small_flags("gsm8k", tmp_path), "--model.name", model, "--orchestrator.batch-size", "8"]
    flags += ["--orchestrator.max-steps-off-policy", "0", "--trainer.lora.rank", "8"]
    result = trained(tmp_path, *flags[:4], *flags[8:], "--env", envs, bound=0)
    for name in ENVIRONMENTS:  # a random model's answers may all be cut, and are then not scored
        assert any(f"env/{name}/turns_per_episode" in row for row in result.rows), name
        assert f"eval/{name}/reward/total" in result.rows[-1]
    (weights,) = Path(model).glob("*.safetensors")
    for row in result.rows:
        assert row["weights/bytes"] < weights.stat().st_size / 3
        assert row["weights/canary_max_diff"] < 1e-4
        assert row["optim/kl_sample_train_v2"] < 1e-4
        assert row["env/search/session/undelivered"] == row["env/search/session/retries"] == 0


@pytest.mark.long
@pytest.mark.parametrize("recipe", ROWS)
def test_each_recipe_runs(recipe: str, model: str, tmp_path: Path) -> None:
    trained(tmp_path, *small_flags(recipe, tmp_path), "--model.name", model)


@pytest.mark.long
def test_smollm2_learns_on_a_laptop(tmp_path: Path) -> None:
    """The lower end of the .95 interval of the gain on 256 held-out problems is at least .2. The interval treats both
    evaluations as independent, which makes it wider than the paired one."""
    fetch = [sys.executable, "-m", "trireme.cli.trireme", "fetch", "smollm2", "--out", str(tmp_path / "model")]
    subprocess.run(fetch, check=True, timeout=600)
    make(tmp_path / "rows.jsonl", 4000, 0)
    flags = ["@", str(DIRECTORY / "laptop.toml"), "--model.name", str(tmp_path / "model")]
    flags += ["--env.args.path", str(tmp_path / "rows.jsonl")]
    flags += ["--run.output-dir", str(tmp_path), "--run.name", "run"]
    result = run_rl(tmp_path, *flags, directory=False, limit_s=7200)
    assert result.code == EXIT_OK, result.out
    base, trained_row = result.rows[0], result.rows[-1]
    gain = trained_row["eval/largest/avg@1"] - base["eval/largest/avg@1"]
    width = sum(row["eval/largest/avg@1/ci95"] ** 2 for row in (base, trained_row)) ** 0.5
    assert gain - width >= 0.2, (base, trained_row)
