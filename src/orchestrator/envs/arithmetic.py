"""Arithmetic: `12+7=` is to be answered by `19` and the end of sequence."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable

from orchestrator.env import EnvContext
from orchestrator.envs.text import Question, QuestionDataset, is_held_out

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class ArithmeticDataset(QuestionDataset):
    """`num_batches` batches of `batch_size` problems of two numbers from 0 to `largest` and one of `operations`.

    The reward is 1 for the exact result, else 0. Raises ValueError for a `largest` below 10 and for unknown operations.
    """

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
                f"largest = {largest}, operations = {operations!r}; expected 10 or more, and some of "
                + "".join(OPERATIONS)
            )
        self._largest, self._operations = largest, operations

    def question(self, index: int) -> Question:
        rng = random.Random(f"arithmetic:{self._context.seed}:{self._context.split}:{index}")
        while True:
            a, sign, b = rng.randint(0, self._largest), rng.choice(self._operations), rng.randint(0, self._largest)
            text = f"{a}{sign}{b}="
            if is_held_out(text) == (self._context.split == "eval"):
                return Question(text, str(OPERATIONS[sign](a, b)))
