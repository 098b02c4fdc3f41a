"""The largest of three numbers, for a chat model of 135M parameters on a laptop: rows, and the reward.

    uv run --no-sync python examples/recipes/largest.py        writes 4,000 rows to outputs/largest.jsonl
    env.id = "reward:examples/recipes/largest.py:correct"

A prompt is the text of a chat of SmolLM2 without the system message that its template would add: 25 tokens.
"""

import argparse
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
NUMBER = re.compile(r"\d+")


def make(file: Path, count: int, seed: int) -> None:
    """Writes `count` different rows: three numbers of two digits, and the largest one."""
    rng = random.Random(seed)
    problems = {}
    while len(problems) < count:
        numbers = rng.sample(range(10, 100), 3)
        problems["Largest of {}, {}, {}?".format(*numbers)] = str(max(numbers))
    write(file, problems.items())


def write(file: Path, problems: Iterable[tuple[str, str]]) -> None:
    """Writes a row for each question and its answer. Prompts are chats without a system message."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"prompt": CHAT.format(question), "answer": answer}) for question, answer in problems]
    file.write_text("".join(f"{row}\n" for row in rows))


def correct(completion, answer):
    """Returns 1.0 if the last number of the answer is the largest one, else 0.0."""
    numbers = NUMBER.findall(completion)
    return float(numbers[-1:] == [answer])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/largest.jsonl"))
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make(options.out, options.rows, options.seed)
