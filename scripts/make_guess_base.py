"""Makes `assets/guess-base`: the model of `make_base_model.py`, taught to play the guessing game, but badly.

    python scripts/make_guess_base.py [--output assets/guess-base] [--seed 0] [--data FILE.jsonl]

Supervised training on whole games: half of the guesses are drawn from all ten digits, whatever the hints said, the
other half from the digits that are still possible. So the rules are known, and playing by them pays, as reinforcement
learning needs it. The loss is on the guesses alone. `sft` trains it, as `make_base_model.py` says.

`--data` writes the examples instead, a line `{"tokens": [...], "weights": [...]}` for each, as `sft` reads them.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from make_base_model import BATCH_SIZE, HELD_OUT, STEPS, make_model, make_tokenizer, save, train
from orchestrator.envs.guess import COST_OF_A_TURN, DIGITS, GREATER, LESS, PROMPT, hint

MAX_TURNS = 4
AT_RANDOM = 0.5
"""Share of the guesses that pay no attention to the hints."""


@dataclass(frozen=True)
class Game:
    """One game as it was played: the guesses, in order."""

    secret: str
    guesses: tuple[str, ...]

    @property
    def solved(self) -> bool:
        return self.guesses[-1] == self.secret

    @property
    def reward(self) -> float:
        if self.solved:
            return 1 - COST_OF_A_TURN * (len(self.guesses) - 1)
        return 0.0


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


@torch.no_grad()
def next_guess(model: Qwen3ForCausalLM, tokens: list[int], eos: int) -> list[int]:
    """A guess sampled at temperature 1: at most three tokens, as in the game."""
    sampled: list[int] = []
    while len(sampled) < 3 and eos not in sampled:
        logits = model(input_ids=torch.tensor([tokens + sampled])).logits[0, -1]
        sampled.append(int(torch.multinomial(logits.softmax(0), 1)))
    return sampled


def sampled_game(model: Qwen3ForCausalLM, tokenizer: Any, secret: str) -> Game:
    """One game that the model plays."""
    tokens = tokenizer.encode(PROMPT)
    guesses = []
    while len(guesses) < MAX_TURNS and secret not in guesses:
        guess = next_guess(model, tokens, tokenizer.eos_token_id)
        guesses.append(tokenizer.decode([t for t in guess if t != tokenizer.eos_token_id]))
        tokens += [*guess, *tokenizer.encode(hint(secret, guesses[-1]))]
    return Game(secret, tuple(guesses))


def report(model: Qwen3ForCausalLM, tokenizer: Any, games: int = 300) -> None:
    """Prints mean reward and success of games sampled at temperature 1."""
    played = [sampled_game(model, tokenizer, DIGITS[i % 10]) for i in range(games)]
    reward, success = (sum(values) / games for values in ([g.reward for g in played], [g.solved for g in played]))
    print(f"sampled  reward {reward:.3f}  success {success:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "assets" / "guess-base")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and of the initial weights")
    parser.add_argument("--data", type=Path, help="write the examples to this file, and train nothing")
    args = parser.parse_args()

    tokenizer = make_tokenizer()
    examples = [make_example(play(args.seed, i), tokenizer) for i in range(STEPS * BATCH_SIZE + HELD_OUT)]
    if args.data:
        args.data.write_text("".join(json.dumps({"tokens": t, "weights": w}) + "\n" for t, w in examples))
        return
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = make_model(tokenizer)
    train(model, tokenizer, examples, "--seed", str(args.seed))
    report(model.eval(), tokenizer)
    save(model, tokenizer, args.output)
    print(f"saved to {args.output}")


if __name__ == "__main__":
    main()
