"""A guessing game of several turns: find the digit, with a hint after each wrong guess.

    Guess 0-9\\n   5<eos>   >   8<eos>   <   7<eos>        `>`: it is greater than that; `<`: it is less

The reward is 1 for a digit found with the first guess, a tenth less for each further guess, and 0 when it is not found.
Each prompt is all that was said before, token for token, and the hint: a whole game is one training sequence.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.env import Env, EnvContext, EnvGroupBuilder, RLDataset, StepResult, StopCondition
from orchestrator.envs.text import end_of_sequence, read_answer

DIGITS = "0123456789"
PROMPT = "Guess 0-9\n"
GREATER, LESS, UNREADABLE = ">", "<", "?"
COST_OF_A_TURN = 0.1


def hint(secret: str, guess: str) -> str:
    """What is said to a wrong guess: where the secret is, or that it was no digit."""
    if len(guess) != 1 or guess not in DIGITS:
        return UNREADABLE
    return GREATER if secret > guess else LESS


class GuessEnv(Env):
    """One game. `hints` has the tokens of each hint."""

    def __init__(self, problem: GuessProblem) -> None:
        self._problem, self._tokens, self._guesses = problem, list(problem.prompt), 0

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return self._tokens, ()

    async def step(self, action: Sequence[int]) -> StepResult:
        problem, answer = self._problem, read_answer(self._problem.tokenizer, action)
        self._guesses += 1
        found = answer.finished and answer.text == problem.secret
        if found or self._guesses == problem.max_turns:
            reward = 1 - COST_OF_A_TURN * (self._guesses - 1) if found else 0.0
            logs = {"secret": problem.secret, "guess": answer.text}
            return StepResult(reward, episode_done=True, metrics={"success": float(found)}, logs=logs)
        said = hint(problem.secret, answer.text if answer.finished else "")
        self._tokens += [*action, *problem.hints[said]]
        return StepResult(0.0, episode_done=False, next_observation=list(self._tokens), logs={"guess": answer.text})


@dataclass(frozen=True)
class GuessProblem(EnvGroupBuilder):
    """One secret; `prompt` and `hints` are tokens."""

    tokenizer: Any
    secret: str
    max_turns: int
    prompt: Sequence[int]
    hints: dict[str, list[int]]
    group_size: int

    async def make_envs(self) -> Sequence[Env]:
        return [GuessEnv(self) for _ in range(self.group_size)]


class GuessDataset(RLDataset):
    """`num_batches` batches of `batch_size` games of at most `max_turns` guesses. There are ten secrets only:
    evaluations draw from the same ones as training.

    Raises ValueError for sizes below 1, and for a tokenizer without an end of sequence.
    """

    def __init__(
        self, context: EnvContext, *, max_turns: int = 4, batch_size: int = 16, num_batches: int = 1000
    ) -> None:
        if min(max_turns, batch_size, num_batches) < 1:
            raise ValueError(
                f"max_turns = {max_turns}, batch_size = {batch_size}, num_batches = {num_batches}; expected at least 1 "
                "of each"
            )
        end_of_sequence(context.tokenizer)
        self._context, self._max_turns = context, max_turns
        self._batch_size, self._num_batches = batch_size, num_batches
        self._prompt = context.tokenizer.encode(PROMPT, add_special_tokens=False)
        self._hints = {h: context.tokenizer.encode(h, add_special_tokens=False) for h in (GREATER, LESS, UNREADABLE)}

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        context, first = self._context, index * self._batch_size
        secrets = [
            random.Random(f"guess:{context.seed}:{context.split}:{first + place}").choice(DIGITS)
            for place in range(self._batch_size)
        ]
        return [
            GuessProblem(context.tokenizer, secret, self._max_turns, self._prompt, self._hints, context.group_size)
            for secret in secrets
        ]

    def __len__(self) -> int:
        return self._num_batches
