"""Reversing a string: `Reverse: stone\\n` is to be answered by `enots` and the end of sequence."""

from __future__ import annotations

import string

from orchestrator.env import EnvContext
from orchestrator.envs.text import Question, QuestionDataset, by_position


class ReverseDataset(QuestionDataset):
    """`num_batches` batches of `batch_size` strings of `min_letters` to `max_letters` characters of `alphabet`.

    The reward is half the share of right positions, and half for an exact answer. Raises ValueError for lengths in the
    wrong order.
    """

    name = "reverse"
    grade = staticmethod(by_position)

    def __init__(
        self,
        context: EnvContext,
        *,
        min_letters: int = 3,
        max_letters: int = 8,
        alphabet: str = string.ascii_lowercase,
        batch_size: int = 16,
        num_batches: int = 1000,
    ) -> None:
        super().__init__(context, batch_size, num_batches)
        if not (1 <= min_letters <= max_letters and len(alphabet) ** max_letters >= 64):
            raise ValueError(
                f"min_letters = {min_letters}, max_letters = {max_letters}, {len(alphabet)} letters in alphabet; "
                "expected 1 <= min <= max, and enough letters for 64 strings"
            )
        self._lengths, self._alphabet = (min_letters, max_letters), alphabet

    def question(self, index: int) -> Question:
        text = self.draw(index, lambda rng: "".join(rng.choices(self._alphabet, k=rng.randint(*self._lengths))))
        return Question(f"Reverse: {text}\n", text[::-1])
