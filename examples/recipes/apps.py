"""APPS: the model writes a program, and each test of the data is an input of it and the output that is right.

env.id = "apps:Apps" with env.path = "examples/recipes", for rows with APPS's columns

The program runs in `run_code`, and its output is compared out here. A program that also held its tests could end with
success before they run, or read what they expect. Problems that ask for a function instead of a program are left out.
"""

import json
import re
from dataclasses import dataclass
from functools import partial

from orchestrator.envs.rows import ListedDataset, problems_of_split
from orchestrator.message_env import MessageEnv, MessageEnvGroup, MessageStep
from trireme.api import CodeLimits, run_code

INSTRUCTION = "Write a Python program that reads the input and prints the output. Put it between ```python and ```."
BLOCK = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    question: str
    difficulty: str
    tests: list[tuple[str, str]]  # inputs and outputs; none for a problem that asks for a function
    solution: str | None


class Program(MessageEnv):
    """The reward is 1 for a program that passes all tests, else 0."""

    def __init__(self, problem, limits):
        self.problem = problem
        self.limits = limits

    async def initial_messages(self):
        return [{"role": "user", "content": f"{self.problem.question}\n\n{INSTRUCTION}"}]

    async def step(self, message):
        blocks = BLOCK.findall(message["content"])
        if not blocks:
            return MessageStep(0.0, True, metrics={"success": 0.0, "no_program": 1.0})
        for text, expected in self.problem.tests:
            result = await run_code(blocks[-1], input=text, limits=self.limits)
            if result.exit_code != 0 or result.output.split() != expected.split():
                metrics = {"success": 0.0, "no_program": 0.0, "over_a_limit": float(result.limit is not None)}
                logs = {"input": text, "printed": result.output, "errors": result.errors, "limit": result.limit}
                return MessageStep(0.0, True, metrics=metrics, logs=logs)
        return MessageStep(1.0, True, metrics={"success": 1.0, "no_program": 0.0, "over_a_limit": 0.0})

    def known_answer(self):
        if self.problem.solution is None:
            return None
        return f"```python\n{self.problem.solution}\n```"


def problem_of(_place, row, tests):
    """Reads one row. Returns its question and the problem, with at most `tests` tests."""
    cases = json.loads(row["input_output"] or "{}", parse_int=str)  # some rows have numbers of thousands of digits
    pairs = list(zip(cases.get("inputs", ()), cases.get("outputs", ()), strict=True))[:tests]
    if "fn_name" in cases or not all(isinstance(text, str) for pair in pairs for text in pair):
        pairs = []
    solutions = json.loads(row["solutions"] or "[]") or [None]
    return row["question"], Problem(row["question"], row["difficulty"], pairs, solutions[0])


class Apps(ListedDataset):
    """The problems of one `difficulty` in `path` and `eval_path`, as for `question_answer`, with the first `tests` of
    their tests. `limit_s` is for each; `limit_processes = false` as in examples/envs/run_code.py."""

    def __init__(
        self,
        context,
        path,
        eval_path=None,
        difficulty="introductory",
        tests=8,
        limit_s=4.0,
        limit_processes=True,
        batch_size=16,
    ):
        limits = CodeLimits(wall_s=limit_s, limit_processes=limit_processes)

        def make(problem):
            return MessageEnvGroup(partial(Program, problem, limits), context.renderer, context.group_size)

        problems = problems_of_split(context, path, eval_path, partial(problem_of, tests=tests))
        chosen = [problem for problem in problems if problem.tests and problem.difficulty == difficulty]
        super().__init__(make, chosen, f"apps:{context.seed}", batch_size)
