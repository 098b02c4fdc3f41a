"""Sorting digits: `Sort: 52413\\n` is to be answered by `12345` and the end of sequence.

The whole environment: functions that make a problem and grade an answer, one `Env`, its builder, the dataset.
`tokenizer` is a `transformers` tokenizer throughout.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.env import Env, EnvContext, EnvGroupBuilder, RLDataset, StepResult, StopCondition
from orchestrator.envs.text import end_of_sequence, is_held_out, read_answer

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


@dataclass(frozen=True)
class Score:
    """`reward` is half the share of right positions, and half for an exact, finished answer."""

    text: str
    matching: float
    exact: bool

    @property
    def reward(self) -> float:
        return 0.5 * self.matching + 0.5 * self.exact


def score(tokenizer: Any, digits: str, tokens: Sequence[int]) -> Score:
    """Grades sampled ids, up to the first end of sequence; without one the answer is not finished, so not exact."""
    answer, target = read_answer(tokenizer, tokens), sorted_digits(digits)
    right = sum(a == b for a, b in zip(answer.text, target, strict=False))
    return Score(answer.text, right / max(len(answer.text), len(target)), answer.finished and answer.text == target)


@dataclass(frozen=True)
class SortEnv(Env):
    """One answer to one problem, whose `prompt` is tokens."""

    tokenizer: Any
    digits: str
    prompt: Sequence[int]

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return self.prompt, ()

    async def step(self, action: Sequence[int]) -> StepResult:
        scored = score(self.tokenizer, self.digits, action)
        return StepResult(
            reward=scored.reward,
            episode_done=True,
            metrics={"success": float(scored.exact)},
            logs={"problem": self.digits, "answer": scored.text, "target": sorted_digits(self.digits)},
        )


@dataclass(frozen=True)
class SortGroupBuilder(EnvGroupBuilder):
    tokenizer: Any
    digits: str
    prompt: Sequence[int]
    group_size: int

    async def make_envs(self) -> Sequence[Env]:
        return [SortEnv(self.tokenizer, self.digits, self.prompt) for _ in range(self.group_size)]


class SortDataset(RLDataset):
    """`num_batches` batches of `batch_size` problems of `min_digits` to `max_digits` digits.

    Raises ValueError for sizes below 1, lengths in the wrong order, and a tokenizer without an end of sequence.
    """

    def __init__(
        self,
        context: EnvContext,
        *,
        min_digits: int = 3,
        max_digits: int = 8,
        batch_size: int = 16,
        num_batches: int = 1000,
    ) -> None:
        if not 1 <= min_digits <= max_digits:
            raise ValueError(f"min_digits = {min_digits}, max_digits = {max_digits}; expected 1 <= min <= max")
        if batch_size < 1 or num_batches < 1:
            raise ValueError(f"batch_size = {batch_size}, num_batches = {num_batches}; expected at least 1 of each")
        end_of_sequence(context.tokenizer)
        self._context = context
        self._digits = (min_digits, max_digits)
        self._batch_size = batch_size
        self._num_batches = num_batches

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        context, first = self._context, index * self._batch_size
        digits = [
            problem(context.seed, first + place, context.split, *self._digits) for place in range(self._batch_size)
        ]
        prompts = context.tokenizer([prompt_text(d) for d in digits])["input_ids"]  # one by one takes twice as long
        return [
            SortGroupBuilder(context.tokenizer, d, prompt, context.group_size)
            for d, prompt in zip(digits, prompts, strict=True)
        ]

    def __len__(self) -> int:
        return self._num_batches
