"""Questions with known answers, such as GSM8K's, from a JSONL or parquet file: one chat message, graded by its result.

    {"question": "Tom has 3 apples and buys 4 more. How many has he?", "answer": "3 + 4 = 7\\n#### 7"}

Only the part of an answer behind `####` counts, if there is one. `grading = "math"` compares with math-verify, which
knows that 1/2 is 0.5 and \\frac{1}{2}; some answers keep it busy for ever, so it runs in a worker process with a time
limit, beyond which the rollout fails. `grading = "exact"` compares the text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from orchestrator.env import EnvContext, EnvGroupBuilder, RLDataset
from orchestrator.envs.text import is_held_out
from orchestrator.message_env import MessageEnv, MessageEnvGroup, MessageStep
from orchestrator.workers import run_in_worker
from trireme.core.extras import require
from trireme.renderers import Message

MARK = "####"
INSTRUCTION = f"Put the final answer alone at the end, behind {MARK}."
LOOKED_AT = 1000
"""Characters at the end of an answer that are graded."""

Grading = Literal["math", "exact"]


def final_answer(text: str) -> str:
    """Returns the text behind the last mark, or all of it without a mark.

    >>> final_answer("3 + 4 = 7\\n#### 7 ")
    '7'
    """
    return text.rpartition(MARK)[2].strip()


def same_number(target: str, given: str) -> bool:
    """True if math-verify takes `given` for `target`. May take any time. Raises ValueError for a target that it cannot
    read."""
    from math_verify import parse, verify

    gold = parse(target if "\\" not in target else f"${target}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the answer {target!r} of the data; expected a number or LaTeX")
    return bool(verify(gold, parse(given, parsing_timeout=None), timeout_seconds=None))


def same_text(target: str, given: str) -> bool:
    """True if both are equal, apart from case, white space and the comma of thousands."""
    one, other = ("".join(text.split()).replace(",", "").casefold() for text in (target, given))
    return one == other


@dataclass
class QuestionAnswerEnv(MessageEnv):
    """One answer to one question."""

    question: str
    target: str
    grading: Grading
    limit_s: float

    async def initial_messages(self) -> Sequence[Message]:
        return [{"role": "user", "content": f"{self.question}\n{INSTRUCTION}"}]

    async def step(self, message: Message) -> MessageStep:
        given = final_answer(message["content"][-LOOKED_AT:])
        if self.grading == "exact":
            right = same_text(self.target, given)
        else:
            right = bool(given) and await run_in_worker(same_number, self.target, given, timeout_s=self.limit_s)
        return self._over(right, given)

    async def unreadable(self, message: Message, cut_off: bool) -> MessageStep:
        return self._over(False, message["content"][-LOOKED_AT:])

    def _over(self, right: bool, given: str) -> MessageStep:
        logs = {"problem": self.question, "answer": given, "target": self.target}
        return MessageStep(float(right), episode_done=True, metrics={"success": float(right)}, logs=logs)


class QuestionAnswerDataset(RLDataset):
    """The questions of `path`, in an order that follows from the seed, `batch_size` to a batch.

    `eval_path` has those of evaluations; without one, an eighth of `path` is kept for them and never trained on.
    `question` and `answer` name the entries of a line. Raises ValueError for files that are no such data.
    """

    def __init__(
        self,
        context: EnvContext,
        *,
        path: str,
        eval_path: str | None = None,
        question: str = "question",
        answer: str = "answer",
        grading: Grading = "math",
        grading_limit_s: float = 10.0,
        batch_size: int = 16,
    ) -> None:
        if grading not in ("math", "exact") or grading_limit_s <= 0 or batch_size < 1:
            raise ValueError(
                f"grading = {grading!r}, grading_limit_s = {grading_limit_s}, batch_size = {batch_size}; expected "
                "'math' or 'exact', more than 0, at least 1"
            )
        if grading == "math":
            require("math_verify", extra="math", what_for='an environment with grading = "math"')
        file = Path(eval_path if eval_path and context.split == "eval" else path).expanduser()
        found = list(read_questions(file, question, answer))
        if eval_path is None:
            found = [pair for pair in found if is_held_out(pair[0]) == (context.split == "eval")]
        if not found:
            raise ValueError(f"{file.absolute()} has no question for the split {context.split!r}")
        random.Random(f"question_answer:{context.seed}").shuffle(found)
        self._context, self._batch_size, self._questions = context, batch_size, found
        self._make: Callable[..., MessageEnv] = partial(QuestionAnswerEnv, grading=grading, limit_s=grading_limit_s)

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        context, first = self._context, index * self._batch_size
        return [
            MessageEnvGroup(partial(self._make, question, target), context.renderer, context.group_size)
            for question, target in self._questions[first : first + self._batch_size]
        ]

    def __len__(self) -> int:
        return -(-len(self._questions) // self._batch_size)


def read_questions(file: Path, question: str, answer: str) -> Iterator[tuple[str, str]]:
    """Yields question and final answer of each row. Raises ValueError that names file and row."""
    if not file.is_file():
        raise ValueError(f"there is no file {file.absolute()}")
    rows = _json_rows(file)
    if file.suffix == ".parquet":
        parquet = require("pyarrow.parquet", extra="parquet", what_for=f"the parquet file {file}")
        rows = parquet.read_table(file).to_pylist()
    for number, row in enumerate(rows, 1):
        values = [row.get(name) for name in (question, answer)] if isinstance(row, Mapping) else [None]
        texts = [str(value) for value in values if isinstance(value, str | int | float)]
        if len(texts) < 2 or not final_answer(texts[1]):
            raise ValueError(
                f"{file}, row {number}: expected {question!r} and {answer!r}, both text; found {str(row)[:200]}"
            )
        yield texts[0], final_answer(texts[1])


def _json_rows(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}, line {number} is no JSON: {error}") from None
