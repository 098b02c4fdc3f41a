"""What environments of plain text share: answers read from tokens, and problems with one question and one answer.

A new one is a subclass of `QuestionDataset`: the question of problem i, and a function that grades an answer.
`tokenizer` is a `transformers` tokenizer throughout.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import eq
from typing import Any

from orchestrator.env import Env, EnvContext, EnvGroupBuilder, RLDataset, StepResult, StopCondition

HELD_OUT_EVERY = 8
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def is_held_out(text: str) -> bool:
    """Whether a problem belongs to the held-out eighth: the CRC-32 of its text is divisible by 8."""
    return zlib.crc32(text.encode()) % HELD_OUT_EVERY == 0


@cache
def token_text(tokenizer: Any, token: int) -> str:
    """The text of one sampled id; one without a token (models pad their vocabulary) is one unknown sign."""
    return tokenizer.decode([token]) if token < len(tokenizer) else UNKNOWN


@cache
def end_of_sequence(tokenizer: Any) -> int:
    """Raises ValueError for a tokenizer without one."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the model's tokenizer has no end-of-sequence token, which ends an answer")
    return tokenizer.eos_token_id  # transformers makes it up from several places at each access


@dataclass(frozen=True)
class Answer:
    """`text` up to the end of sequence; without one the answer is not `finished`: it was cut by its length."""

    text: str
    finished: bool


def read_answer(tokenizer: Any, tokens: Sequence[int]) -> Answer:
    """The answer that was sampled as `tokens`, character by character: for tokenizers in which a token is a text of its
    own, whatever stands around it."""
    tokens, end = list(tokens), end_of_sequence(tokenizer)
    finished = end in tokens
    told = tokens[: tokens.index(end)] if finished else tokens
    return Answer("".join(token_text(tokenizer, token) for token in told), finished)


@dataclass(frozen=True)
class Question:
    """One problem: what is asked, and what should be answered."""

    prompt: str
    target: str


@dataclass(frozen=True)
class Grade:
    """What an answer is worth; `success` is 1 for a right one."""

    reward: float
    success: float
    metrics: Mapping[str, float] = field(default_factory=dict)


Grader = Callable[[str, Answer], Grade]
"""From the target and an answer."""


def by_position(target: str, answer: Answer) -> Grade:
    """Half the share of positions that are right, and half for an exact, finished answer."""
    right = sum(map(eq, answer.text, target))
    exact = answer.finished and answer.text == target
    return Grade(0.5 * right / max(len(answer.text), len(target)) + 0.5 * exact, float(exact))


def exactly(target: str, answer: Answer) -> Grade:
    """1 for an exact, finished answer, white space around it aside."""
    exact = float(answer.finished and answer.text.strip() == target)
    return Grade(exact, exact)


@dataclass(frozen=True)
class QuestionEnv(Env):
    """One answer to one question, whose `prompt` is tokens."""

    tokenizer: Any
    question: Question
    prompt: Sequence[int]
    grade: Grader

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return self.prompt, ()

    async def step(self, action: Sequence[int]) -> StepResult:
        answer = read_answer(self.tokenizer, action)
        grade = self.grade(self.question.target, answer)
        return StepResult(
            reward=grade.reward,
            episode_done=True,
            metrics={"success": grade.success, **grade.metrics},
            logs={"problem": self.question.prompt, "answer": answer.text, "target": self.question.target},
        )


@dataclass(frozen=True)
class QuestionGroup(EnvGroupBuilder):
    """One question, for `size` rollouts."""

    env: QuestionEnv
    size: int

    async def make_envs(self) -> Sequence[Env]:
        return [self.env] * self.size  # it has no state


class QuestionDataset(RLDataset):
    """`num_batches` batches of `batch_size` questions. Raises ValueError for sizes below 1, and for a tokenizer without
    an end of sequence."""

    grade: Grader = staticmethod(exactly)

    def __init__(self, context: EnvContext, batch_size: int, num_batches: int) -> None:
        if batch_size < 1 or num_batches < 1:
            raise ValueError(f"batch_size = {batch_size}, num_batches = {num_batches}; expected at least 1 of each")
        end_of_sequence(context.tokenizer)
        self._context, self._batch_size, self._num_batches = context, batch_size, num_batches

    @abstractmethod
    def question(self, index: int) -> Question:
        """Problem `index`, a pure function of the seed, the split and the arguments."""

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        context, first = self._context, index * self._batch_size
        questions = [self.question(first + place) for place in range(self._batch_size)]
        prompts = context.tokenizer([q.prompt for q in questions])["input_ids"]  # one by one takes twice as long
        return [
            QuestionGroup(QuestionEnv(context.tokenizer, q, prompt, self.grade), context.group_size)
            for q, prompt in zip(questions, prompts, strict=True)
        ]

    def __len__(self) -> int:
        return self._num_batches
