"""Reverse and arithmetic: which problems there are, and what answers are worth."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from orchestrator.env import EnvContext, RLDataset, load_dataset
from orchestrator.envs.text import QuestionDataset, is_held_out
from trireme.config.schema import EnvConfig
from trireme.core.errors import BadInput

ASSET = Path(__file__).parents[4] / "assets" / "sort-base"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(ASSET)


def dataset(tokenizer: Any, env: str, split: Any = "train", seed: int = 0, **args: Any) -> QuestionDataset:
    made = load_dataset(EnvConfig(id=env, args=args), EnvContext(tokenizer, seed, 2, split))
    assert isinstance(made, QuestionDataset)
    return made


def prompts(of: RLDataset, batches: int) -> list[str]:
    return [builder.make().question.prompt for i in range(batches) for builder in of.get_batch(i)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("env", "prompt", "target"),
    [("reverse", "Reverse: weix\n", "xiew"), ("arithmetic", "43+31=", "74")],
)
def test_problems_must_not_change_between_versions(tokenizer: Any, env: str, prompt: str, target: str) -> None:
    question = dataset(tokenizer, env).question(0)
    assert (question.prompt, question.target) == (prompt, target), "runs resume on them"


@pytest.mark.parametrize("env", ["reverse", "arithmetic"])
def test_problems_follow_from_seed_split_and_place(tokenizer: Any, env: str) -> None:
    once = prompts(dataset(tokenizer, env, batch_size=4), 3)
    assert once == prompts(dataset(tokenizer, env, batch_size=6), 2), "batches are stretches of one sequence"
    assert once != prompts(dataset(tokenizer, env, seed=1, batch_size=4), 3)
    held_out = prompts(dataset(tokenizer, env, "eval"), 10)
    assert not set(held_out) & set(prompts(dataset(tokenizer, env), 10))


def test_what_is_held_out_is_the_text_that_is_asked_about(tokenizer: Any) -> None:
    for split in ("train", "eval"):
        for question in map(dataset(tokenizer, "reverse", split).question, range(50)):
            assert is_held_out(question.target[::-1]) == (split == "eval")


@pytest.mark.parametrize(
    ("env", "said", "finished", "reward", "success"),
    [
        ("reverse", "xiew", True, 1.0, 1.0),
        ("reverse", "xiew", False, 0.5, 0.0),
        ("reverse", "xiewx", True, 0.5 * 4 / 5, 0.0),
        ("reverse", "", True, 0.0, 0.0),
        ("arithmetic", "74", True, 1.0, 1.0),
        ("arithmetic", "74", False, 0.0, 0.0),
        ("arithmetic", "740", True, 0.0, 0.0),
        ("arithmetic", " 74\n", True, 1.0, 1.0),
    ],
)
def test_an_episode(tokenizer: Any, env: str, said: str, finished: bool, reward: float, success: float) -> None:
    builder = pickle.loads(pickle.dumps(dataset(tokenizer, env).get_batch(0)[0]))

    async def play() -> Any:
        first, second = await builder.make_envs()
        prompt, stop = await second.initial_observation()
        action = [*tokenizer.encode(said), *([tokenizer.eos_token_id] if finished else [])]
        return prompt, stop, await first.step(action)

    prompt, stop, result = asyncio.run(play())
    assert (tokenizer.decode(prompt), stop) == (builder.make().question.prompt, ())
    assert result.reward == pytest.approx(reward)
    assert (result.metrics, result.episode_done) == ({"success": success}, True)


@pytest.mark.parametrize(
    ("env", "args"),
    [
        ("reverse", {"min_letters": 9}),
        ("reverse", {"alphabet": "a"}),
        ("arithmetic", {"operations": "/"}),
        ("arithmetic", {"largest": 3}),
        ("arithmetic", {"batch_size": 0}),
    ],
)
def test_bad_arguments_are_bad_input(tokenizer: Any, env: str, args: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"env\.args.*expected"):
        dataset(tokenizer, env, **args)
