"""Shared parts of environments: problems that are generated from their index, answers that are decoded from tokens, and
environments with one question and one answer.

A new environment with one question and one answer is a subclass of `QuestionDataset`: its `question` returns the
question of problem i, and its `grade` is a function that grades an answer. Each `tokenizer` is a `transformers`
tokenizer.

The names in docs/api.md are stable.
"""

from __future__ import annotations

import random
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from operator import eq
from typing import ClassVar

from orchestrator.env import Env, EnvContext, EnvGroup, EnvGroupBuilder, RLDataset, StepResult, StopCondition
from trireme.core.tokenizer import Tokenizer

HELD_OUT_EVERY = 8
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def is_held_out(text: str) -> bool:
    """Returns True for the text of a problem that belongs to evaluations and is never trained on: about an eighth of
    all texts, the ones for which the CRC-32 is divisible by 8."""
    return zlib.crc32(text.encode()) % HELD_OUT_EVERY == 0


@dataclass
class GeneratedDataset(RLDataset):
    """A dataset of `num_batches` batches with `batch_size` problems each. A problem is generated from its index in the
    dataset. Subclasses must be dataclasses, because their fields are the arguments of the environment.

    Raises ValueError if an integer among the arguments is below 1.
    """

    name: ClassVar[str]
    """The name of the environment in the seeds of its random generators."""
    context: EnvContext
    batch_size: int = 16
    num_batches: int = 1000

    def __post_init__(self) -> None:
        sizes = {field.name: getattr(self, field.name) for field in fields(self) if type(field.default) is int}
        if min(sizes.values()) < 1:
            listed = ", ".join(f"{name} = {value}" for name, value in sizes.items())
            raise ValueError(f"{listed}; expected at least 1 of each")

    @abstractmethod
    def builders(self, numbers: Sequence[int]) -> list[EnvGroupBuilder]:
        """Returns a builder for each problem whose index is in `numbers`. A problem depends only on its index, the
        seed, the split and the arguments."""

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return self.builders(range(index * self.batch_size, (index + 1) * self.batch_size))

    def __len__(self) -> int:
        return self.num_batches

    def rng(self, index: int) -> random.Random:
        """Returns the random generator of problem `index`."""
        return random.Random(f"{self.name}:{self.context.seed}:{self.context.split}:{index}")

    def draw(self, index: int, make: Callable[[random.Random], str]) -> str:
        """Calls `make` with the random generator of problem `index`, again and again, until the returned text belongs
        to the context's split (`is_held_out`), and returns this text."""
        rng = self.rng(index)
        while True:
            text = make(rng)
            if is_held_out(text) == (self.context.split == "eval"):
                return text


@cache
def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns the text of one sampled token id; UNKNOWN for an id that the tokenizer does not have, since models pad
    their vocabulary."""
    if token < len(tokenizer):
        return tokenizer.decode([token])
    return UNKNOWN


@cache
def end_of_sequence(tokenizer: Tokenizer) -> int:
    """Returns the id of the end-of-sequence token. Raises ValueError for a tokenizer without such a token."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the model's tokenizer has no end-of-sequence token; expected one to end an answer. Set eos_token in its "
            "tokenizer_config.json"
        )
    return tokenizer.eos_token_id  # slow in transformers, hence the cache


@dataclass(frozen=True)
class Answer:
    """An answer as text."""

    text: str
    """The text before the end-of-sequence token."""
    finished: bool
    """False if the answer has no end-of-sequence token, because it reached the token limit and was cut off."""

    @classmethod
    def read(cls, tokenizer: Tokenizer, tokens: Sequence[int]) -> Answer:
        """Decodes the sampled answer `tokens`, one token at a time. Use this only with tokenizers in which the text of
        a token does not depend on its neighbours."""
        tokens = list(tokens)
        end = end_of_sequence(tokenizer)
        finished = end in tokens
        shown = tokens[: tokens.index(end)] if finished else tokens
        return cls("".join(token_text(tokenizer, token) for token in shown), finished)


@dataclass(frozen=True)
class Question:
    """One problem: the prompt, and the right answer."""

    prompt: str
    target: str


Grader = Callable[[str, Answer], tuple[float, float]]
"""Takes the target and an answer; returns the reward, and 1 for a right answer, else 0."""


def by_position(target: str, answer: Answer) -> tuple[float, float]:
    """Returns two numbers for an answer: its reward, and 1 if it is exact and finished, else 0. The reward is half the
    share of positions with the right character, plus 0.5 if the answer is exact and finished."""
    right = sum(map(eq, answer.text, target))
    exact = answer.finished and answer.text == target
    return 0.5 * right / max(len(answer.text), len(target)) + 0.5 * exact, float(exact)


@dataclass(frozen=True)
class QuestionEnv(Env):
    """An episode in which the policy gives one answer to one question. `prompt` holds the token ids of the question."""

    tokenizer: Tokenizer
    question: Question
    prompt: Sequence[int]
    grade: Grader

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return self.prompt, ()

    async def step(self, action: Sequence[int]) -> StepResult:
        answer = Answer.read(self.tokenizer, action)
        reward, success = self.grade(self.question.target, answer)
        logs = {"problem": self.question.prompt, "answer": answer.text, "target": self.question.target}
        return StepResult(reward, episode_done=True, metrics={"success": success}, logs=logs)

    def known_answer(self) -> str:
        return self.question.target


@dataclass
class QuestionDataset(GeneratedDataset):
    """`num_batches` batches of `batch_size` questions. Raises ValueError for sizes below 1, and for a tokenizer without
    an end-of-sequence token."""

    grade = staticmethod(by_position)

    def __post_init__(self) -> None:
        super().__post_init__()
        end_of_sequence(self.context.tokenizer)

    @abstractmethod
    def question(self, index: int) -> Question:
        """Returns the question of problem `index`. It depends only on the index, the seed, the split and the
        arguments."""

    def builders(self, numbers: Sequence[int]) -> list[EnvGroupBuilder]:
        tokenizer = self.context.tokenizer
        size = self.context.group_size
        questions = [self.question(number) for number in numbers]
        prompts = tokenizer([q.prompt for q in questions])["input_ids"]  # one by one takes twice as long
        return [
            EnvGroup(partial(QuestionEnv, tokenizer, question, prompt, self.grade), size)
            for question, prompt in zip(questions, prompts, strict=True)
        ]
