"""Reversing a string: `Reverse: stone\\n` is to be answered by `enots` and the end of sequence.

PYTHONPATH=examples/envs uv run rl --env.id reverse:Reverse --model.name Qwen/Qwen3-0.6B ...

A task with one question and one answer is a subclass of `QuestionDataset`: its fields are the arguments, and `question`
returns problem `index`.
"""

import string
from dataclasses import dataclass

from orchestrator.envs.text import Question, QuestionDataset


@dataclass(kw_only=True)
class Reverse(QuestionDataset):
    """`num_batches` batches of `batch_size` strings of `min_letters` to `max_letters` lower-case letters.

    The reward is half the share of right positions, and half for an exact answer.
    """

    name = "reverse"

    min_letters: int = 3
    max_letters: int = 8

    def question(self, index: int) -> Question:
        lengths = (self.min_letters, self.max_letters)
        text = self.draw(index, lambda rng: "".join(rng.choices(string.ascii_lowercase, k=rng.randint(*lengths))))
        return Question(f"Reverse: {text}\n", text[::-1])
