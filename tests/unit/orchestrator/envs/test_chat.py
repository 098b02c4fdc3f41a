"""A MessageEnv that is an environment by itself: its problems, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from renderer_support import bpe

from orchestrator.env import EnvContext, load_dataset
from orchestrator.message_env import MessageEnv, MessageStep
from trireme.config.schema import EnvConfig, RendererConfig
from trireme.core.errors import BadInput
from trireme.renderers import Message

ROLES = RendererConfig(name="role_colon")


class Echo(MessageEnv):
    def __init__(self, word: str) -> None:
        self.word = word

    @staticmethod
    def problems(split: str, seed: int, count: int = 40) -> list[str]:
        return [f"{split} {seed} {n}" for n in range(count)]

    async def initial_messages(self) -> Sequence[Message]:
        return [{"role": "user", "content": self.word}]

    async def step(self, message: Message) -> MessageStep:
        return MessageStep(float(message["content"] == self.word), True)


class NoProblems(MessageEnv):
    """Is not played, as it has no problems."""


def words(seed: int = 0, split: Any = "train", **args: Any) -> list[str]:
    context = EnvContext(bpe(), seed, 3, split, ROLES)
    dataset = load_dataset(EnvConfig(id=f"{__name__}:Echo", args=args), context)
    return [problem.make().word for index in range(len(dataset)) for problem in dataset.get_batch(index)]


def test_each_problem_is_played_once_in_an_order_of_the_seed() -> None:
    assert sorted(words()) == sorted(Echo.problems("train", 0))
    assert words() == words()
    numbers = {seed: [word.split()[-1] for word in words(seed)] for seed in (0, 1)}
    assert numbers[0] != numbers[1]


def test_split_and_arguments_reach_the_class() -> None:
    assert sorted(words(7, "eval", count=3, batch_size=2)) == ["eval 7 0", "eval 7 1", "eval 7 2"]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("NoProblems", {}, r"NoProblems'> has no `problems`; expected a static method `problems\(split, seed\)`"),
        ("Echo", {"cuont": 3}, "got an unexpected keyword argument 'cuont'"),
        ("Echo", {"count": 0}, "has no problems; expected at least one batch"),
        ("MessageEnv", {}, "expected a subclass of orchestrator.env.RLDataset or of orchestrator.message_env.Mess"),
        ("Missing", {}, "Its datasets: Echo, NoProblems"),
    ],
)
def test_classes_and_arguments_that_do_not_suit(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_dataset(EnvConfig(id=f"{__name__}:{name}", args=args), EnvContext(bpe(), 0, 3, "train", ROLES))
