"""Questions with known answers, such as GSM8K's, from files (`rows`). The policy answers by one chat message, which is
graded by its final answer.

    {"question": "Tom has 3 apples and buys 4 more. How many has he?", "answer": "3 + 4 = 7\\n#### 7"}

Only the part of an answer behind `####` counts, if there is one. `grading = "math"` compares with math-verify, which
knows that 1/2 is 0.5 and \\frac{1}{2}; some answers keep it busy for ever, so it runs in a worker process with a time
limit, beyond which the rollout fails. `grading = "exact"` compares the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Literal

from orchestrator.env import EnvContext
from orchestrator.envs.reward import RewardProblem, RewardRow
from orchestrator.envs.rows import ListedDataset, problems_of_split
from trireme.core.extras import require
from trireme.renderers import Message

with suppress(ImportError):  # the extra `math`; a worker process imports it before the time of a call begins
    from math_verify import parse, verify

MARK = "####"
INSTRUCTION = f"Put the final answer alone at the end, behind {MARK}."
LOOKED_AT = 1000
"""The number of characters at the end of an answer that are graded."""

Grading = Literal["math", "exact"]


def final_answer(text: str) -> str:
    """Returns the text after the last `####`, or the whole text if it has no `####`. White space at both ends is
    removed.

    >>> final_answer("3 + 4 = 7\\n#### 7 ")
    '7'
    """
    return text.rpartition(MARK)[2].strip()


def same_number(target: str, answer: str) -> bool:
    """Returns True if math-verify judges `answer` equal to `target`. May run for ever. Raises ValueError if math-verify
    cannot read `target`."""
    gold = parse(target if "\\" not in target else f"${target}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the answer {target!r} of the data; expected a number or LaTeX")
    return bool(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))


def same_text(target: str, answer: str) -> bool:
    """Returns True if both texts are equal, apart from case, white space and commas."""
    one, other = ("".join(text.split()).replace(",", "").casefold() for text in (target, answer))
    return one == other


def success(answer: str, target: str, grading: Grading, finished: bool) -> bool:
    """Returns True if the final part of `answer` equals `target` by the rule `grading`. An answer that is not
    `finished` (cut off by length) is wrong."""
    final = final_answer(answer[-LOOKED_AT:])
    same = same_text if grading == "exact" else same_number
    return finished and bool(final) and same(target, final)


class QuestionAnswerDataset(ListedDataset[RewardRow]):
    """The questions of `path`, in an order that follows from the seed, with `batch_size` questions in a batch.

    `eval_path` has the questions for evaluations. Without `eval_path`, about an eighth of the questions of `path` are
    for evaluations, and are never trained on. `question` and `answer` name the entries of a row. `grading_limit_s`:
    seconds to grade an answer. Raises ValueError for malformed files.
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
        if grading not in ("math", "exact") or grading_limit_s <= 0:
            raise ValueError(
                f"grading = {grading!r}, grading_limit_s = {grading_limit_s}; expected 'math' or 'exact', and a limit "
                "above 0 s"
            )
        if grading == "math":
            require("math_verify", extra="math", what_for='an environment with grading = "math"')
        read = partial(question_of, question=question, answer=answer, grading=grading)
        super().__init__(
            partial(RewardProblem, context, __file__, {"success": 1.0}, grading_limit_s),
            problems_of_split(context, path, eval_path, read),
            f"question_answer:{context.seed}",
            batch_size,
        )


def question_of(place: str, row: object, question: str, answer: str, grading: Grading) -> tuple[str, RewardRow]:
    """Reads one row of the data; `question` and `answer` name its entries. Returns the text of the question, and a
    RewardRow with the prompt, the final answer and `grading`. Raises ValueError that names `place`."""
    if isinstance(row, Mapping):
        values = [row.get(name) for name in (question, answer)]
    else:
        values = []
    texts = [str(value) for value in values if isinstance(value, str | int | float)]
    if len(texts) < 2 or not final_answer(texts[1]):
        raise ValueError(f"{place}: expected {question!r} and {answer!r}, both text; found {str(row)[:200]}")
    target = final_answer(texts[1])
    prompt = Message(role="user", content=f"{texts[0]}\n{INSTRUCTION}")
    return texts[0], RewardRow(place, {"target": target, "grading": grading}, [prompt], f"{MARK} {target}")
