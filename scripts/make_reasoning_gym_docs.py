"""Writes the table of docs/reasoning-gym.md, in some minutes: `python -W ignore scripts/make_reasoning_gym_docs.py`.
Each generator of the installed reasoning-gym is asked for problems at its default difficulty."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reasoning_gym.factory import DATASETS

from orchestrator.envs.reasoning_gym import AROUND_ANSWERS, generator
from page_parts import with_part

TARGET = Path(__file__).parents[1] / "docs" / "reasoning-gym.md"
SIZE = 2000
SCORED = 3
"""Items with scorers that are tried, and digests that two processes compare."""
COMPARED_SIZE = 64
COUNTING_S = 5.0
FEW_QUESTIONS = 1000
SLOW_MS = 100
NOT_ALONE = {"composite": "a mixture of others: use several environments with weights"}


def examine(task: str) -> tuple[str, str]:
    """Returns how `exact` scores the answers of a generator, and notes on its questions."""
    if task in NOT_ALONE:
        return "refused", NOT_ALONE[task]
    items = generator(task, {}, SIZE)
    started = time.process_time()
    drawn, distinct = few_questions(items)
    took_ms = 1000 * (time.process_time() - started) / drawn
    if distinct:
        notes = [f"few: {distinct} among {drawn} items"]
    else:
        notes = []
    return scoring(items), ", ".join(notes + (["slow"] if took_ms > SLOW_MS else []))


def few_questions(items: Any) -> tuple[int, int]:
    """Draws items of a generator for COUNTING_S. Returns (the number of drawn items, the number of distinct questions
    among them); the second is 0 unless the items have more than 0.5 fewer distinct questions than uniform draws from
    FEW_QUESTIONS questions would have on average."""
    questions: set[str] = set()
    drawn = 0
    end = time.monotonic() + COUNTING_S
    while drawn < SIZE and time.monotonic() < end:
        questions.add(items[drawn]["question"])
        drawn += 1
    expected = FEW_QUESTIONS * (1 - (1 - 1 / FEW_QUESTIONS) ** drawn)
    return drawn, len(questions) if len(questions) < expected - 0.5 else 0


def scoring(items: Any) -> str:
    """Returns how `exact` scores the answers of a generator."""
    entries = [items[index] for index in range(SCORED)]
    if not isinstance(entries[0]["answer"], str):
        return "refused"
    lenient = any(marks(items, entry, around) >= 1 for entry in entries for around in AROUND_ANSWERS)
    if lenient:
        return "the known answer"
    return "any right answer"


def marks(items: Any, entry: Mapping[str, object], around: str) -> float:
    """Returns what the scorer gives for a text with the known answer in it; 0 where it cannot read the text."""
    try:
        return items.score_answer(around.format(entry["answer"]), entry)
    except Exception:
        return 0.0


def digests() -> dict[str, str]:
    """Returns a digest of the first problems of each generator, as this process makes them."""
    digest_of = {}
    for task in sorted(DATASETS.keys() - NOT_ALONE.keys()):
        items = generator(task, {}, COMPARED_SIZE)
        problems = [(items[index]["question"], items[index]["answer"]) for index in range(SCORED)]
        digest_of[task] = hashlib.sha256(repr(problems).encode()).hexdigest()
    return digest_of


def differing() -> set[str]:
    """Returns the generators with other problems in another process."""
    command = [sys.executable, "-W", "ignore", __file__, "--digests"]
    names = []
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        names.append(json.loads(process.stdout.splitlines()[-1]))
    return {task for task, digest in names[0].items() if digest != names[1][task]}


def lines() -> Iterator[str]:
    """Yields a row of the table for each generator."""
    unstable = differing()
    for task in sorted(DATASETS):
        exact, notes = examine(task)
        print(task, exact, notes, file=sys.stderr, flush=True)
        yield f"| `{task}` | {exact} | {', '.join(filter(None, (notes, 'differs' if task in unstable else '')))} |\n"


if __name__ == "__main__":
    if "--digests" in sys.argv:
        print("\n" + json.dumps(digests()))  # some generators print
    else:
        head = f"| reasoning-gym {version('reasoning-gym')} | `exact` | notes |\n|---|---|---|\n"
        page = with_part(TARGET.read_text(encoding="utf-8"), "generators", head + "".join(lines()))
        TARGET.write_text(page, encoding="utf-8")
