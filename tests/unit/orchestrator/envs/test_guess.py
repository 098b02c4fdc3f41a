"""The guessing game: its turns as tokens, its rewards, and the base model's data."""

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from chat_support import Policy, rollout
from transformers import PreTrainedTokenizerFast

from orchestrator.env import Env, EnvContext, EnvGroup, Trajectory, load_dataset
from orchestrator.envs.guess import DIGITS, GuessEnv
from orchestrator.rollout import RolloutLimits
from trireme.config.schema import EnvConfig
from trireme.core.errors import BadInput

ASSET = Path(__file__).parents[4] / "assets" / "guess-base"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(ASSET)


def games(tokenizer: Any, batches: int = 1, seed: int = 0, split: Any = "train", **args: Any) -> list[EnvGroup]:
    dataset = load_dataset(EnvConfig(id="guess", args=args), EnvContext(tokenizer, seed, 2, split))
    return [builder for i in range(batches) for builder in dataset.get_batch(i)]  # type: ignore[misc]


def secret_of(game: EnvGroup) -> str:
    env = game.make()
    assert isinstance(env, GuessEnv)
    return env.secret


def play(tokenizer: Any, env: Env, texts: list[str]) -> Trajectory:
    """One game, as a rollout plays it; `.` at the end of a guess is the end of sequence."""
    end = {True: [tokenizer.eos_token_id], False: []}
    answers = [[*tokenizer.encode(text.removesuffix(".")), *end[text.endswith(".")]] for text in texts]
    return asyncio.run(rollout(env, Policy(answers), RolloutLimits(len(tokenizer), 32)))


@pytest.mark.parametrize(
    ("texts", "reward", "shown"),
    [
        (["3."], 1.0, "3."),
        (["1.", "8.", "3."], 0.8, "1.>8.<3."),
        (["1.", "2.", "0.", "3."], 0.7, "1.>2.>0.>3."),
        (["1.", "2.", "0.", "4.", "3."], 0.0, "1.>2.>0.>4."),
        (["33.", "3", "3 .", "3."], 0.7, "33.?3?3 .?3."),
        (["3", "a.", "3", "3"], 0.0, "3?a.?3?3"),
    ],
)
def test_a_game_is_one_growing_sequence_of_tokens(tokenizer: Any, texts: list[str], reward: float, shown: str) -> None:
    game = next(game for game in games(tokenizer, 10) if secret_of(game) == "3")
    trajectory = play(tokenizer, asyncio.run(pickle.loads(pickle.dumps(game)).make_env(0)), texts)
    assert trajectory.reward == pytest.approx(reward)
    *earlier, last = trajectory.transitions
    assert tokenizer.decode([*last.observation, *last.action]).replace("<eos>", ".") == f"Guess 0-9\n{shown}"
    assert trajectory.num_segments == 1
    assert [turn.metrics for turn in trajectory.transitions] == [*[{}] * len(earlier), {"success": float(reward > 0)}]


def test_secrets_follow_from_seed_split_and_place(tokenizer: Any) -> None:
    secrets = [secret_of(g) for g in games(tokenizer, 4)]
    assert "".join(secrets[:8]) == "66962708", "runs resume on them"
    assert secrets == [secret_of(g) for g in games(tokenizer, 2, batch_size=32)]
    variants = [games(tokenizer, 4, seed=1), games(tokenizer, 4, split="eval")]
    assert all(secrets != [secret_of(g) for g in other] for other in variants)
    assert set(secrets) == set(DIGITS)


@pytest.mark.parametrize("args", [{"max_turns": 0}, {"num_batches": 0}, {"turns": 3}])
def test_bad_arguments_are_bad_input(tokenizer: Any, args: dict[str, int]) -> None:
    with pytest.raises(BadInput, match=r"env\.args"):
        games(tokenizer, **args)
