r"""Sorting digits: the answer to `Sort: 52413\n` is `12345` and the end of sequence."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.envs.text import Question, QuestionDataset

PROMPT = "Sort: {}\n"


@dataclass(kw_only=True)
class SortDataset(QuestionDataset):
    """Problems that ask to sort a string of digits: `num_batches` batches of `batch_size` problems. A string has
    `min_digits` to `max_digits` digits; its length and its digits are drawn uniformly. The reward is half the share of
    positions with the right digit, plus 0.5 if the answer is exact and ends with the end-of-sequence token.

    Raises ValueError for sizes below 1, lengths in the wrong order, and a tokenizer without an end of sequence.
    """

    name = "sort"

    min_digits: int = 3
    max_digits: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_digits > self.max_digits:
            raise ValueError(
                f"min_digits = {self.min_digits}, max_digits = {self.max_digits}; expected 1 <= min <= max"
            )

    def question(self, index: int) -> Question:
        digits = self.digits(index)
        return Question(PROMPT.format(digits), "".join(sorted(digits)))

    def digits(self, index: int) -> str:
        """Returns the digits of problem `index`."""
        lengths = (self.min_digits, self.max_digits)
        return self.draw(index, lambda rng: "".join(rng.choices("0123456789", k=rng.randint(*lengths))))
