"""The agent of `examples/agents/guessing.py`, with the secrets of `orchestrator.envs.guess` in their order."""

import random

from guessing import MAX_TURNS, Bare, play, shared

from orchestrator.envs.guess import DIGITS

__all__ = ["MAX_TURNS", "Bare", "play", "problems", "shared"]


def problems(split: str, seed: int, count: int = 60) -> list[str]:
    """Returns secrets in such an order that, shuffled as an agent's problems are, they are those of `guess`."""
    secrets = [random.Random(f"guess:{seed}:{split}:{number}").choice(DIGITS) for number in range(count)]
    order = list(range(count))
    random.Random(f"agent:{seed}").shuffle(order)
    return [secrets[order.index(number)] for number in range(count)]
