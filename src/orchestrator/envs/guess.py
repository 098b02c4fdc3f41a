"""A guessing game of several turns: find the digit, with a hint after each wrong guess.

    Guess 0-9\\n   5<eos>   >   8<eos>   <   7<eos>        `>`: the digit is greater; `<`: it is less

The reward is 1 for a digit found with the first guess, a tenth less for each further guess, and 0 when it is not found.
Each prompt is all tokens so far and the hint: a whole game is one training sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from orchestrator.env import Continuation, Env, EnvGroup, EnvGroupBuilder, StepResult, StopCondition
from orchestrator.envs.text import Answer, GeneratedDataset, end_of_sequence
from trireme.core.tokenizer import Tokenizer

DIGITS = "0123456789"
PROMPT = "Guess 0-9\n"
GREATER = ">"
LESS = "<"
UNREADABLE = "?"
COST_OF_A_TURN = 0.1


def hint(secret: str, guess: str) -> str:
    """Returns the hint after a wrong guess: GREATER or LESS if the secret is greater or less than the guess, UNREADABLE
    if the guess is no digit."""
    if len(guess) != 1 or guess not in DIGITS:
        return UNREADABLE
    if secret > guess:
        return GREATER
    return LESS


@dataclass
class GuessEnv(Env):
    """One game, in which the policy guesses `secret`. `prompt` holds the token ids of the first prompt; `hints` maps
    the text of each hint to its token ids."""

    tokenizer: Tokenizer
    secret: str
    max_turns: int
    prompt: Sequence[int]
    hints: Mapping[str, Sequence[int]]
    _guesses: int = field(default=0, init=False)

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return self.prompt, ()

    async def step(self, action: Sequence[int]) -> StepResult:
        answer = Answer.read(self.tokenizer, action)
        self._guesses += 1
        correct = answer.finished and answer.text == self.secret
        if correct or self._guesses == self.max_turns:
            if correct:
                reward = 1 - COST_OF_A_TURN * (self._guesses - 1)
            else:
                reward = 0.0
            logs = {"secret": self.secret, "guess": answer.text}
            return StepResult(reward, episode_done=True, metrics={"success": float(correct)}, logs=logs)
        feedback = self.hints[hint(self.secret, answer.text if answer.finished else "")]
        return StepResult(0.0, episode_done=False, next_observation=Continuation(feedback), logs={"guess": answer.text})

    def known_answer(self) -> str:
        return self.secret

    def state_dict(self) -> Mapping[str, object]:
        return {"guesses": self._guesses}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._guesses = state["guesses"]


@dataclass(kw_only=True)
class GuessDataset(GeneratedDataset):
    """`num_batches` batches of `batch_size` games of at most `max_turns` guesses. Training and evaluations draw from
    the same secrets, because there are only ten.

    Raises ValueError for sizes below 1, and for a tokenizer without an end of sequence.
    """

    name = "guess"

    max_turns: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        tokenizer = self.context.tokenizer
        end_of_sequence(tokenizer)
        prompt, *hints = (tokenizer.encode(t, add_special_tokens=False) for t in (PROMPT, GREATER, LESS, UNREADABLE))
        self._tokens = (prompt, dict(zip((GREATER, LESS, UNREADABLE), hints, strict=True)))

    def builders(self, numbers: Sequence[int]) -> list[EnvGroupBuilder]:
        secrets = [self.rng(number).choice(DIGITS) for number in numbers]
        games = [partial(GuessEnv, self.context.tokenizer, s, self.max_turns, *self._tokens) for s in secrets]
        return [EnvGroup(game, self.context.group_size) for game in games]
