"""Generators of the package reasoning-gym: `env.id = "reasoning_gym:<task>"`, with the generator's keys in
`env.args.difficulty`.

    generator[index] --question--> one chat message --> answer --extract--> the part that counts --exact--> reward

Item `index` of a generator follows from the generator's seed + `index`, so generators with different seeds share items.
All runs therefore use the generator of seed 0; a run's seed decides which indexes are drawn. Two indexes may have the
same question: so a hash assigns each question to training or to evaluations, and the other leaves it out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from typing import Any, Literal, get_args

from orchestrator.env import EnvContext, EnvGroupBuilder
from orchestrator.envs.reward import RewardProblem, RewardRow
from orchestrator.envs.text import GeneratedDataset, is_held_out
from trireme.core.extras import require
from trireme.core.finite_json import to_json
from trireme.renderers import Message

with suppress(ImportError):  # the extra `reasoning-gym`; a worker process imports it before the time of a call begins
    from reasoning_gym.factory import DATASETS, create_dataset

Extraction = Literal["raw", "tag", "last_number", "last_word"]
Reward = Literal["exact", "score"]
Entry = Mapping[str, Any]
"""A problem of a generator, with the keys `question`, `answer` and `metadata`."""

TAGS = "Put the final answer, and nothing else, between <answer> and </answer>."
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"(?<!\d)-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
AROUND_WORDS = ".,;:!?'\"`*()[]"
AROUND_ANSWERS = ("1 {} 2", "x {} y", "wrong {}", "{} wrong")
"""Formats of texts that contain a right answer but are wrong answers."""
MOST_TRIES = 500


def extract(text: str, extraction: Extraction) -> str:
    """Returns the part of the answer `text` that counts, by the rule `extraction`; "" if there is no such part.

    >>> extract("12 x 100 is 1,200.", "last_number")
    '1200'
    """
    text = text.strip()
    match extraction:
        case "raw":
            return text
        case "tag":
            return (TAGGED.findall(text) or [""])[-1].strip()
        case "last_number":
            return (NUMBER.findall(text) or [""])[-1].replace(",", "")
        case "last_word":
            return (text.split() or [""])[-1].strip(AROUND_WORDS)


# ---- rewards, which worker processes compute


def exact(
    text: str, task: str, difficulty: Mapping[str, object], entry: Entry, extraction: Extraction, finished: bool
) -> float:
    """Returns 1 if the extracted part of the answer is right and contains nothing else. Else, or if the answer is not
    `finished`, returns 0.

    The generator's scorer decides, because a question may have several right answers. But some scorers give full marks
    to a text that contains the right answer among wrong ones. If the scorer does so, only the known answer of `entry`
    is right.
    """
    answer = extract(text, extraction)
    if not finished or not answer:
        return 0.0
    if answer == entry["answer"].strip():
        return 1.0
    marks = partial(_marks, task, difficulty, entry)
    right = marks(answer) >= 1 and not any(marks(around.format(entry["answer"])) >= 1 for around in AROUND_ANSWERS)
    return float(right)


def score(
    text: str, task: str, difficulty: Mapping[str, object], entry: Entry, extraction: Extraction, finished: bool
) -> float:
    """Returns the generator's score for the extracted part of an answer; 0 if the answer is not `finished`."""
    if finished:
        return _marks(task, difficulty, entry, extract(text, extraction))
    return 0.0


def _marks(task: str, difficulty: Mapping[str, object], entry: Entry, answer: str) -> float:
    scorer = _scorer(task, to_json(difficulty))
    try:
        return float(scorer.score_answer(answer, entry))
    except Exception:  # some scorers raise for a text that they cannot read
        return 0.0


@cache
def _scorer(task: str, difficulty: str) -> Any:
    """Returns the generator of `task`, configured with the keys in `difficulty` (JSON), for scoring answers. A cache
    holds it for later calls, because some generators take seconds to make."""
    return generator(task, json.loads(difficulty))


# ---- problems


def generator(task: str, difficulty: Mapping[str, object], size: int = 1) -> Any:
    """Returns a generator of reasoning-gym, with items 0 .. `size` - 1. Raises ValueError for an unknown `task`, or
    an unknown key of `difficulty`. If the generator rejects a value of `difficulty`, raises the generator's error."""
    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no generator {task!r}; it has {', '.join(sorted(DATASETS))}")
    options = {field.name for field in fields(DATASETS[task][1])} - {"seed", "size"}
    unknown = difficulty.keys() - options
    if unknown:
        raise ValueError(
            f"difficulty sets {', '.join(sorted(unknown))}; expected only options of {task}: "
            f"{', '.join(sorted(options)) or 'none'}"
        )
    return create_dataset(task, seed=0, size=size, **difficulty)


class ReasoningGymDataset(GeneratedDataset):
    """Questions from the first `size` items of the generator `task`; about an eighth of them is for evaluations.

    `answer`: the rule that extracts the part of an answer that counts. `reward`: the name of the function that scores
    this part. `limit_s`: seconds to score an answer. Raises ValueError for wrong arguments, and if `reward` is "exact"
    but the generator knows no answers.
    """

    name = "reasoning_gym"

    def __init__(
        self,
        task: str,
        context: EnvContext,
        *,
        answer: Extraction = "raw",
        reward: Reward = "exact",
        difficulty: Mapping[str, object] | None = None,
        size: int = 10_000,
        batch_size: int = 16,
        num_batches: int = 1000,
        limit_s: float = 10.0,
    ) -> None:
        require("reasoning_gym", extra="reasoning-gym", what_for=f"the environment reasoning_gym:{task}")
        super().__init__(context, batch_size, num_batches)
        for name, value, allowed in (("answer", answer, Extraction), ("reward", reward, Reward)):
            if value not in get_args(allowed):
                raise ValueError(f"{name} = {value!r}; expected one of {', '.join(get_args(allowed))}")
        self._task = task
        self._extraction = answer
        self._difficulty = dict(difficulty or {})
        self._items = generator(task, self._difficulty, size)
        self._size = size
        self._make = partial(RewardProblem, context, __file__, {reward: 1.0}, limit_s)
        if reward == "exact" and not isinstance(self._items[0]["answer"], str):
            raise ValueError(f"reward = 'exact' for {task}, which knows no answers; expected reward = 'score'")

    def builders(self, numbers: Sequence[int]) -> list[EnvGroupBuilder]:
        return [self._problem(number) for number in numbers]

    def _problem(self, number: int) -> RewardProblem:
        rng = self.rng(number)
        for _ in range(MOST_TRIES):
            index = rng.randrange(self._size)
            entry = self._items[index]
            if is_held_out(entry["question"]) == (self.context.split == "eval"):
                return self._make(self._row(index, entry))
        raise ValueError(
            f"none of {MOST_TRIES} drawn items of reasoning_gym:{self._task} belongs to the split "
            f"{self.context.split!r}: the items have too few different questions. Choose another task or difficulty, "
            "or a larger size"
        )

    def _row(self, index: int, entry: Entry) -> RewardRow:
        question = entry["question"]
        answer = entry["answer"]
        if self._extraction == "tag":
            question = f"{question}\n{TAGS}"
            answer = answer and f"<answer>{answer}</answer>"
        columns = {
            "task": self._task,
            "difficulty": self._difficulty,
            "entry": entry,
            "extraction": self._extraction,
        }
        place = f"item {index} of reasoning_gym:{self._task}"
        return RewardRow(place, columns, [Message(role="user", content=question)], answer)
