"""Makes `assets/guess-base`: the model of `make_base_model.py`, taught to play the guessing game, but badly.

    python scripts/make_guess_base.py [--output assets/guess-base] [--seed 0]

Supervised training on whole games: half of the guesses are drawn from all ten digits, whatever the hints said, the
other half from the digits that are still possible. So the rules are known, and playing by them pays, as reinforcement
learning needs it. The loss is on the guesses alone. `sft` trains it, as `make_base_model.py` says. How well it plays:

    trireme eval assets/guess-base @ configs/guess.toml
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from make_base_model import BATCH_SIZE, HELD_OUT, STEPS, make_model, make_tokenizer, save, train
from orchestrator.envs.guess import DIGITS, GREATER, LESS, PROMPT, hint

MAX_TURNS = 4
AT_RANDOM = 0.5
"""Share of the guesses that pay no attention to the hints."""


@dataclass(frozen=True)
class Game:
    """One game as it was played: the guesses, in order."""

    secret: str
    guesses: tuple[str, ...]


def play(seed: int, index: int) -> Game:
    """Game `index` of the supervised data, a pure function of its arguments."""
    rng = random.Random(f"guess-base:{seed}:{index}")
    secret = rng.choice(DIGITS)
    possible = list(DIGITS)
    guesses: list[str] = []
    while len(guesses) < MAX_TURNS and secret not in guesses:
        guess = rng.choice(DIGITS if rng.random() < AT_RANDOM else possible)
        guesses.append(guess)
        if guess != secret:
            answer = hint(secret, guess)
            possible = [
                d for d in possible if (d > guess if answer == GREATER else d < guess if answer == LESS else True)
            ]
    return Game(secret, tuple(guesses))


def make_example(game: Game, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Returns a game as tokens, and the weight of each: 1 for tokens of a guess and the end of sequence after it, else
    0.
    """
    tokens = tokenizer.encode(PROMPT)
    weights = [0] * len(tokens)
    for guess in game.guesses:
        tokens_of_guess = [*tokenizer.encode(guess), tokenizer.eos_token_id]
        if guess == game.secret:
            answered = []
        else:
            answered = tokenizer.encode(hint(game.secret, guess))
        tokens += tokens_of_guess + answered
        weights += [1] * len(tokens_of_guess) + [0] * len(answered)
    return tokens, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "assets" / "guess-base")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and of the initial weights")
    args = parser.parse_args()

    tokenizer = make_tokenizer()
    examples = [make_example(play(args.seed, i), tokenizer) for i in range(STEPS * BATCH_SIZE + HELD_OUT)]
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = make_model(tokenizer)
    train(model, tokenizer, examples, "--seed", str(args.seed))
    save(model, tokenizer, args.output)
    print(f"saved to {args.output}")


if __name__ == "__main__":
    main()
