"""Reversing a string: `Reverse: stone\\n` is to be answered by `enots` and the end of sequence."""

from __future__ import annotations

import string
from dataclasses import dataclass

from orchestrator.envs.text import Question, QuestionDataset, by_position


@dataclass(kw_only=True)
class ReverseDataset(QuestionDataset):
    """`num_batches` batches of `batch_size` strings of `min_letters` to `max_letters` characters of `alphabet`.

    The reward is half the share of right positions, and half for an exact answer. Raises ValueError for lengths in the
    wrong order.
    """

    name = "reverse"
    grade = staticmethod(by_position)

    min_letters: int = 3
    max_letters: int = 8
    alphabet: str = string.ascii_lowercase

    def __post_init__(self) -> None:
        super().__post_init__()
        letters = len(self.alphabet)
        if self.min_letters > self.max_letters or letters**self.max_letters < 64:
            raise ValueError(
                f"min_letters = {self.min_letters}, max_letters = {self.max_letters}, {letters} letters in alphabet; "
                "expected 1 <= min <= max, and enough letters for 64 strings"
            )

    def question(self, index: int) -> Question:
        lengths = (self.min_letters, self.max_letters)
        text = self.draw(index, lambda rng: "".join(rng.choices(self.alphabet, k=rng.randint(*lengths))))
        return Question(f"Reverse: {text}\n", text[::-1])
