"""Reward functions in one file: `env.id = "reward:my_rewards.py:score"`, with prompts from the rows of a data file
(`rows`).

    def score(answer, target):                      the text of an answer, and the columns of its row that are named
        return float(answer.strip() == target)      (`**row`: all of them)

    def brief(completions, **columns):              the answers of a group, and lists of columns, as TRL calls it
        return [-len(text) / 100 for text in completions]

Either may be `async`. All run in worker processes, with a time limit. A function that takes one answer and computes is
called when the answer is there, so that its failure fails one rollout only. A function that takes `completions`, or a
coroutine function, which may wait, is called once for all answers of a group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable, iscoroutinefunction, signature
from typing import Any

from orchestrator.env import (
    Env,
    EnvContext,
    EnvGroupBuilder,
    StepResult,
    StopCondition,
    Trajectory,
    in_short,
    named_function,
    run_file,
)
from orchestrator.envs.rows import ListedDataset, problems_of_split
from orchestrator.rollout import RolloutError, check_report
from orchestrator.workers import run_in_worker
from trireme.core.errors import BadInput
from trireme.core.finite_json import to_json
from trireme.core.refusals import Refusal
from trireme.core.tokenizer import encode_text
from trireme.renderers import Message
from trireme.sft.reading import BadExample, check_messages

OF_TRL = ("prompts", "completions", "completion_ids")
"""Names of the lists that a function with a parameter `completions` may take in addition to the columns of the data."""
SHOWN = 300
"""The most characters of the answers, or of a row, that an error shows."""

Answer = Mapping[str, Any]
"""One answer, with these keys. `text`: the answer, in a chat without thinking; `finished`: False if the answer was cut
off or is malformed; `parse_error`: 1 for a malformed answer, else 0; `prompts`, `completions` and `completion_ids`: the
entries for this answer in TRL's lists of these names."""
Scored = tuple[float, dict[str, float]]
"""The weighted sum of the scores of one answer, and each function's score."""


class RewardFailed(RolloutError):
    """A reward function raised an exception, or did not return exactly one score for each answer."""


@dataclass(frozen=True)
class RewardRow:
    """One row of the data."""

    place: str
    """The file of the row, and the row's number in the file, as text for messages."""
    columns: Mapping[str, object]
    prompt: str | list[Message]
    known_answer: str | None


class RewardFile:
    """A file of reward functions. Making or unpickling a RewardFile runs its file, unless this process has already run
    the file. A worker process unpickles the RewardFile of a call before the call's time limit begins, so the limit does
    not include running the file."""

    def __init__(self, source: str) -> None:
        self.source = source
        run_file(source)

    def __reduce__(self) -> tuple[type[RewardFile], tuple[str]]:
        return RewardFile, (self.source,)


@dataclass(frozen=True)
class RewardProblem(EnvGroupBuilder):
    """One prompt, and the functions that score its answers."""

    context: EnvContext
    source: str
    """The file of the functions."""
    weights: Mapping[str, float]
    """The weight of each function in the reward."""
    limit_s: float
    """Limit in seconds for all calls for one answer, or for one group."""
    row: RewardRow

    async def make_env(self, sample: int) -> RewardEnv:
        return RewardEnv(self)

    async def try_rewards(self) -> None:
        """Calls every reward function with two trial answers: the known answer (if there is one) and an empty answer.
        Raises BadInput if a function fails."""
        end = () if isinstance(self.row.prompt, str) else self.context.renderer.stop_tokens()[:1]
        texts = (self.row.known_answer or "", "")
        answers = [self.answer([*encode_text(self.context.tokenizer, text), *end]) for text in texts]
        try:
            await self._scored(list(self.weights), answers)
        except Exception as error:
            raise BadInput(
                f"{', '.join(self.weights)} of {self.source} failed in a trial with {self.row.place}: {error}. A "
                "reward function must give a finite number for any answer, within env.args.limit_s: correct it"
            ) from error

    async def score_alone(self, answer: Answer) -> Scored:
        """Returns the scores of one answer, from the functions that take a single answer and are not coroutine
        functions. Raises the errors of `run_in_worker`."""
        return (await self._scored([name for name in self.weights if not self._waits(name)], [answer]))[0]

    async def compute_group_rewards(self, trajectories_G: Sequence[Trajectory]) -> list[Scored]:
        answers = [self.answer(trajectory.transitions[-1].action.tolist()) for trajectory in trajectories_G]
        return await self._scored(list(filter(self._waits, self.weights)), answers)

    @property
    def scores_in_any_process(self) -> bool:
        return True

    def answer(self, tokens: list[int]) -> Answer:
        """Decodes an answer that was sampled as `tokens`, and returns the values that reward functions may get: text,
        TRL's columns, and whether the answer is finished or malformed."""
        prompt = self.row.prompt
        context = self.context
        text = str(context.tokenizer.decode(tokens, skip_special_tokens=True))
        answer: dict[str, object] = {"prompts": prompt, "completions": text, "completion_ids": tokens}
        if isinstance(prompt, str):
            return {**answer, "text": text, "finished": context.tokenizer.eos_token_id in tokens, "parse_error": 0.0}
        message, whole = context.renderer.parse_response(tokens)
        answer["completions"] = [{"role": "assistant", "content": text}]
        malformed = not whole and context.renderer.finished(tokens)
        return {**answer, "text": message["content"], "finished": whole, "parse_error": float(malformed)}

    def _waits(self, name: str) -> bool:
        """Returns True if the function `name` is called only when all answers of the group are there: it takes
        `completions`, or is a coroutine function."""
        function = named_function("reward", self.source, name)
        return takes_completions(function) or iscoroutinefunction(function)

    async def _scored(self, names: list[str], answers: list[Answer]) -> list[Scored]:
        if not names:
            return [(0.0, {}) for _ in answers]
        call = (RewardFile(self.source), names, self.row, answers)
        scores_G = await run_in_worker(score, *call, timeout_s=self.limit_s)
        return [(sum(self.weights[name] * value for name, value in scores.items()), scores) for scores in scores_G]


@dataclass(frozen=True)
class RewardEnv(Env):
    """One answer to one prompt. A text prompt is tokenised unchanged; messages are a chat."""

    problem: RewardProblem

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        prompt = self.problem.row.prompt
        context = self.problem.context
        if isinstance(prompt, str):
            return context.tokenizer.encode(prompt), ()
        return context.renderer.generation_prompt(prompt), context.renderer.stop_condition()

    async def step(self, action: Sequence[int]) -> StepResult:
        answer = self.problem.answer(list(action))
        reward, metrics = await self.problem.score_alone(answer)
        row = self.problem.row
        logs = {"row": row.place, "answer": answer["text"], "known_answer": row.known_answer}
        return StepResult(reward, True, metrics={"parse_error": answer["parse_error"], **metrics}, logs=logs)

    def known_answer(self) -> str | None:
        return self.problem.row.known_answer


class RewardDataset(ListedDataset[RewardRow]):
    """The prompts of `path` (and `eval_path`, as for `question_answer`). `rewards` names the functions that score
    answers: `FILE.py:FUNCTION`, or several function names separated by commas. `weights`: {function: its weight in the
    reward}; a function without an entry has weight 1.

    `prompt` names the column of prompts; each prompt is a text or a list of messages. With `chat`, a text prompt is a
    user's message in a chat. `answer` names the column of known answers, if there are any. `limit_s`: seconds for all
    calls for one answer, or for one group. Raises BadInput for functions that cannot be called with the columns of a
    row, ValueError for other wrong arguments and for malformed files.
    """

    def __init__(
        self,
        rewards: str,
        context: EnvContext,
        *,
        path: str,
        eval_path: str | None = None,
        prompt: str = "prompt",
        answer: str = "answer",
        weights: Mapping[str, float] | None = None,
        chat: bool = False,
        limit_s: float = 10.0,
        batch_size: int = 16,
    ) -> None:
        source, _, functions = rewards.rpartition(":")
        all_weights = {**dict.fromkeys(functions.split(","), 1.0), **(weights or {})}
        read = partial(row_of, prompt=prompt, answer=answer, chat=chat)
        rows = problems_of_split(context, path, eval_path, read)
        for row in {tuple(row.columns): row for row in rows}.values():
            for name in all_weights:
                _refuse_columns(source, name, row)
        make = partial(RewardProblem, context, source, all_weights, limit_s)
        super().__init__(make, rows, f"reward:{context.seed}", batch_size)


def row_of(place: str, row: object, prompt: str, answer: str, chat: bool) -> tuple[str, RewardRow]:
    """Reads one row of the data. `prompt` and `answer` name its columns; `chat`: True if a text prompt is a user's
    message in a chat. Returns the prompt as JSON, and the RewardRow. Raises ValueError, which names `place`."""
    if not isinstance(row, Mapping) or not row.get(prompt):
        raise ValueError(f"{place} has no {prompt!r}, which env.args.prompt names; the row is {str(row)[:SHOWN]}")
    question = row[prompt]
    known_answer = row.get(answer)
    if chat and isinstance(question, str):
        question = [{"role": "user", "content": question}]
    if not isinstance(question, str):
        try:
            check_messages(question)
        except BadExample as error:
            raise ValueError(f"{place}, {prompt}: {error.args[0]}; expected a text, or {error.args[1]}") from None
    return to_json(question), RewardRow(place, row, question, None if known_answer is None else str(known_answer))


def _refuse_columns(source: str, name: str, row: RewardRow) -> None:
    """Raises BadInput for a function that is not there, or cannot be called with the columns of a row."""
    function = named_function("reward", source, name)
    try:
        for call in _calls(function, row, [dict.fromkeys(("text", "finished", *OF_TRL), "")]):
            signature(function).bind(*call.args, **call.keywords)
    except TypeError as error:
        raise Refusal(
            f"the reward function {name} of {source}, which cannot be called for {row.place}: {error}. The columns of "
            f"this row: {', '.join(row.columns)}",
            "a function whose first parameter takes the answer, or a function with a parameter `completions`. Each "
            "other parameter needs a default, or the name of a column that every row has (with `completions` also "
            "`prompts`)",
            "add the missing column, or give its parameter a default; if a column has the name of the function's first "
            "parameter, rename this parameter",
        ) from None


# ---- in a worker process


def score(file: RewardFile, names: list[str], row: RewardRow, answers: list[Answer]) -> list[dict[str, float]]:
    """Returns for each answer {function: its score}. `names`: the functions of `file` to call. Raises RolloutError that
    names function and row."""
    columns = {name: _scores(file.source, name, row, answers) for name in names}
    return [{name: scores[n] for name, scores in columns.items()} for n in range(len(answers))]


def _scores(source: str, name: str, row: RewardRow, answers: list[Answer]) -> list[float]:
    texts = str([answer["text"] for answer in answers])[:SHOWN]
    place = f"{name} of {source}, {row.place}, answers {texts}"
    function = named_function("reward", source, name)
    try:
        returned = asyncio.run(_awaited([call() for call in _calls(function, row, answers)]))
        if takes_completions(function):
            scores = list(returned[0])
        else:
            scores = returned
    except Exception as error:
        raise RewardFailed(f"{place}: {in_short(error)}") from error
    if len(scores) != len(answers):
        raise RewardFailed(f"{place}: returned {len(scores)} scores; expected {len(answers)}, one for each answer")
    for value in scores:
        check_report(value, {}, place)
    return [float(value) for value in scores]


async def _awaited(returned: list[Any]) -> list[Any]:
    """Returns the results of a function's calls. If the first of `returned` is awaitable, awaits them all at the same
    time."""
    if isawaitable(returned[0]):
        return list(await asyncio.gather(*returned))
    return returned


def _calls(function: Callable[..., object], row: RewardRow, answers: list[Answer]) -> list[partial[object]]:
    """Prepares the calls of `function` without making them: one call for all answers if it takes `completions`, else
    one call for each answer."""
    parameters = signature(function).parameters
    columns = dict(row.columns)
    if takes_completions(function):
        columns = {name: [value] * len(answers) for name, value in columns.items()}
        columns |= {name: [answer[name] for answer in answers] for name in OF_TRL}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        named = list(parameters)[not takes_completions(function) :]
        columns = {name: value for name, value in columns.items() if name in named}
    if takes_completions(function):
        return [partial(function, **columns)]
    of_answer = {"finished"} & parameters.keys() - columns.keys()
    return [
        partial(function, answer["text"], **columns, **{name: answer[name] for name in of_answer}) for answer in answers
    ]


def takes_completions(function: Callable[..., object]) -> bool:
    """Returns True if the function has a parameter `completions`: it takes the answers of a whole group as lists."""
    return "completions" in signature(function).parameters
