"""Sorting digits: `Sort: 52413\\n` is to be answered by `12345` and the end of sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

from orchestrator.env import EnvContext
from orchestrator.envs.text import Grade, Question, QuestionDataset, by_position, is_held_out, read_answer

Split = Literal["train", "eval"]


def problem(seed: int, index: int, split: Split, min_digits: int, max_digits: int) -> str:
    """The digits of problem `index`, a pure function of the arguments: held-out strings for "eval", others for "train".

    Lengths are uniform from `min_digits` to `max_digits`, digits are uniform.
    """
    rng = random.Random(f"sort:{seed}:{split}:{index}")
    while True:
        digits = "".join(rng.choices("0123456789", k=rng.randint(min_digits, max_digits)))
        if is_held_out(digits) == (split == "eval"):
            return digits


def prompt_text(digits: str) -> str:
    return f"Sort: {digits}\n"


def sorted_digits(digits: str) -> str:
    return "".join(sorted(digits))


def score(tokenizer: Any, digits: str, tokens: Sequence[int]) -> Grade:
    """Grades sampled ids: half the share of right positions, and half for an exact, finished answer."""
    return by_position(sorted_digits(digits), read_answer(tokenizer, tokens))


class SortDataset(QuestionDataset):
    """`num_batches` batches of `batch_size` problems of `min_digits` to `max_digits` digits.

    Raises ValueError for sizes below 1, lengths in the wrong order, and a tokenizer without an end of sequence.
    """

    grade = staticmethod(by_position)

    def __init__(
        self,
        context: EnvContext,
        *,
        min_digits: int = 3,
        max_digits: int = 8,
        batch_size: int = 16,
        num_batches: int = 1000,
    ) -> None:
        super().__init__(context, batch_size, num_batches)
        if not 1 <= min_digits <= max_digits:
            raise ValueError(f"min_digits = {min_digits}, max_digits = {max_digits}; expected 1 <= min <= max")
        self._digits = (min_digits, max_digits)

    def question(self, index: int) -> Question:
        digits = problem(self._context.seed, index, self._context.split, *self._digits)
        return Question(prompt_text(digits), sorted_digits(digits))
