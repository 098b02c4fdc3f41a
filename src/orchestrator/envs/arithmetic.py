"""Arithmetic: `12+7=` is to be answered by `19` and the end of sequence."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from orchestrator.envs.expressions import calculate, show
from orchestrator.envs.text import Question, QuestionDataset

OPERATIONS = "+-*"


@dataclass(kw_only=True)
class ArithmeticDataset(QuestionDataset):
    """`num_batches` batches of `batch_size` problems of two numbers from 0 to `largest` and one of `operations`.

    The reward is 1 for the exact result, else 0. Raises ValueError for a `largest` below 10 and for unknown operations.
    """

    name = "arithmetic"

    largest: int = 99
    operations: str = "+-"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.largest < 10 or not self.operations or set(self.operations) - set(OPERATIONS):
            raise ValueError(
                f"largest = {self.largest}, operations = {self.operations!r}; expected 10 or more, and some of "
                f"{OPERATIONS}"
            )

    def question(self, index: int) -> Question:
        text = self.draw(index, self._problem)
        return Question(text, show(calculate(text.removesuffix("="))))

    def _problem(self, rng: Random) -> str:
        a, sign, b = rng.randint(0, self.largest), rng.choice(self.operations), rng.randint(0, self.largest)
        return f"{a}{sign}{b}="
