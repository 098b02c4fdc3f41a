"""Arithmetic: `12+7=` is to be answered by `19` and the end of sequence."""

from __future__ import annotations

from random import Random

from orchestrator.env import EnvContext
from orchestrator.envs.expressions import calculate, show
from orchestrator.envs.text import Question, QuestionDataset

OPERATIONS = "+-*"


class ArithmeticDataset(QuestionDataset):
    """`num_batches` batches of `batch_size` problems of two numbers from 0 to `largest` and one of `operations`.

    The reward is 1 for the exact result, else 0. Raises ValueError for a `largest` below 10 and for unknown operations.
    """

    name = "arithmetic"

    def __init__(
        self,
        context: EnvContext,
        *,
        largest: int = 99,
        operations: str = "+-",
        batch_size: int = 16,
        num_batches: int = 1000,
    ) -> None:
        super().__init__(context, batch_size, num_batches)
        if largest < 10 or not operations or set(operations) - set(OPERATIONS):
            raise ValueError(
                f"largest = {largest}, operations = {operations!r}; expected 10 or more, and some of {OPERATIONS}"
            )
        self._largest, self._operations = largest, operations

    def question(self, index: int) -> Question:
        text = self.draw(index, self._problem)
        return Question(text, show(calculate(text.removesuffix("="))))

    def _problem(self, rng: Random) -> str:
        a, sign, b = rng.randint(0, self._largest), rng.choice(self._operations), rng.randint(0, self._largest)
        return f"{a}{sign}{b}="
