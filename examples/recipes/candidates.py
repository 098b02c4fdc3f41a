"""Short tasks for a chat model of 135M parameters, by generators of reasoning-gym: rows, for an evaluation that says
which of them the model can begin to learn.

    uv run trireme fetch smollm2
    uv run --no-sync python examples/recipes/largest.py
    uv run --no-sync python examples/recipes/candidates.py     writes 128 rows of each task to outputs/candidates
    uv run --no-sync trireme eval models/smollm2-135m @ examples/recipes/laptop.toml @ examples/recipes/candidates.toml
    ... the same with --eval.temperature 0.6

The generators' own questions are longer: a prompt has the numbers alone, and at most 25 tokens. Rewards are those of
largest.py, which reads digits, so items with a negative answer are left out.
"""

from itertools import count, islice
from pathlib import Path

from largest import write
from reasoning_gym.factory import create_dataset

TASKS = {
    "digits": ("products", {"max_digits": 1}, "{expression} = ?"),
    "products": ("products", {"min_digits": 2, "max_digits": 2}, "{expression} = ?"),
    "gcd": ("gcd", {"min_value": 10, "max_value": 99}, "GCD of {numbers[0]}, {numbers[1]}?"),
    "chain_sum": ("chain_sum", {"max_terms": 2, "min_digits": 2, "max_digits": 2}, "{expression} = ?"),
}
"""For each file of rows: a generator, its difficulty, and the question by an item's metadata."""
DIRECTORY = Path("outputs/candidates")
ROWS = 128


def make(directory: Path) -> None:
    """Writes the first items of each generator, from seed 0 on."""
    for name, (generator, difficulty, question) in TASKS.items():
        items = create_dataset(generator, seed=0, **difficulty)
        entries = (items[index] for index in count())
        problems = ((question.format(**entry["metadata"]), entry["answer"]) for entry in entries)
        write(directory / f"{name}.jsonl", islice((pair for pair in problems if int(pair[1]) >= 0), ROWS))


if __name__ == "__main__":
    make(DIRECTORY)
