"""Rewards in one file: how functions are called, what is refused before a run starts, and with which row."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.env import EnvContext, Trajectory, load_dataset
from orchestrator.trajectory import TrajectoryBuilder
from orchestrator.workers import workers
from trireme.config.schema import EnvConfig
from trireme.core.errors import BadInput
from trireme.core.types import VersionSpan, WeightIdentity

REWARDS = """
import asyncio

def score(answer, target):
    return answer.strip() == target

def everything(said, **row):
    return len(row)

def brief(prompts, completions, completion_ids, target, **columns):
    assert [len(prompts), len(completions), len(completion_ids), len(target)] == [len(prompts)] * 4
    texts = [said if isinstance(said, str) else said[0]["content"] for said in completions]
    return [-len(text) / 10 for text in texts]

async def judged(answer, target, barrier=[]):
    barrier.append(answer)
    await asyncio.sleep(0.01)  # all others of the group are asked meanwhile
    return len(barrier)
"""
ROWS = [{"prompt": f"{n} + {n} = ", "target": str(2 * n), "answer": 2 * n} for n in range(40)]


def config(
    tmp_path: Path, functions: str, rewards: str = REWARDS, rows: Sequence[Any] = ROWS, **args: Any
) -> EnvConfig:
    (tmp_path / "my_rewards.py").write_text(rewards)
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = str(tmp_path / "data.jsonl")
    return EnvConfig(id=f"reward:{tmp_path}/my_rewards.py:{functions}", args={"path": path, **args})


def first_problem(env: EnvConfig, tokenizer: Any) -> Any:
    return pickle.loads(pickle.dumps(load_dataset(env, EnvContext(tokenizer, 0, 2)).get_batch(0)[0]))


def trajectory(tokens: Sequence[int]) -> Trajectory:
    builder, spans = TrajectoryBuilder(), (VersionSpan(WeightIdentity(0, 0, "w"), 0, len(tokens)),)
    builder.ask(np.asarray([1], np.int32))
    logprobs = np.zeros(len(tokens), np.float32)
    builder.answer(np.asarray(tokens, np.int32), logprobs, spans, "stop", 0.0, {}, {}, True)
    return builder.finish("stop")


async def play(env: EnvConfig, tokenizer: Any, *texts: str) -> tuple[str, list[Any], list[Any]]:
    """The first prompt; for each answer what its step, and what the group, says of it."""
    problem, steps = first_problem(env, tokenizer), []
    answers = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    async with workers(1):
        for number, answer in enumerate(answers):
            made_env = await problem.make_env(number)
            prompt, _ = await made_env.initial_observation()
            steps.append(await made_env.step(answer))
        grouped = await problem.compute_group_rewards([trajectory(answer) for answer in answers])
    return tokenizer.decode(prompt), steps, grouped


async def test_each_form_gets_its_columns_and_each_function_is_a_weighted_metric(
    tmp_path: Path, tokenizer: Any
) -> None:
    env = config(tmp_path, "score,everything,brief,judged", weights={"brief": 10.0, "judged": 0.5})
    problem = first_problem(env, tokenizer)
    target = problem.row.columns["target"]
    assert problem.scores_in_any_process
    prompt, (right, wrong), grouped = await play(env, tokenizer, target, "so")
    assert prompt == f"{int(target) // 2} + {int(target) // 2} = ", "a prompt that is text is tokenised as it is"
    assert (right.reward, right.metrics) == (4.0, {"score": 1.0, "everything": 3.0, "parse_error": 0.0})
    assert (wrong.reward, wrong.metrics["score"]) == (3.0, 0.0)
    assert [metrics["brief"] for _, metrics in grouped] == [-len(target) / 10, -0.2]
    assert [metrics["judged"] for _, metrics in grouped] == [2.0, 2.0], "both were waited for at the same time"
    assert grouped[1][0] == pytest.approx(10 * -0.2 + 0.5 * 2)


async def test_prompts_may_be_messages_as_in_trl(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], "target": row["target"]} for row in ROWS]
    for data, args in ((rows, {}), (ROWS, {"chat": True})):
        env = config(tmp_path, "score,brief", rows=data, **args)
        prompt, (step,), ((_, metrics),) = await play(env, tokenizer, " 1")
        assert prompt.startswith("User: "), "a chat is rendered"
        assert (step.logs["answer"].strip(), metrics) == ("1", {"brief": -0.2})
        assert step.metrics["parse_error"] == 0
    _, (malformed,), _ = await play(config(tmp_path, "score", chat=True), tokenizer, "<think>1")
    assert malformed.metrics["parse_error"] == 1


async def test_what_a_file_imports_does_not_count_in_its_time(tmp_path: Path, tokenizer: Any) -> None:
    env = config(tmp_path, "score", "import time\ntime.sleep(1.5)\ndef score(said): return 1", limit_s=1.0)
    _, (step,), _ = await play(env, tokenizer, "?")
    assert step.reward == 1


FAILING = {
    "def score(answer): return None": "gave the reward 'None' of type NoneType",
    "def score(answer): return 'good'": "gave the reward 'good' of type str",
    "def score(answer): return float('nan')": "gave the reward nan; expected a finite number",
    "def score(answer): return int(answer)": r"ValueError: invalid literal .*my_rewards\.py, line 1",
    "def score(completions): return [1.0]": "returned 1 scores; expected 2, one for each answer",
    "def score(completions): return 1.0": "TypeError: 'float' object is not iterable",
    "async def score(answer): return None": "gave the reward 'None'",
    "import time\ndef score(answer): time.sleep(60)": "took longer than 1 s",
}


async def test_a_function_that_fails_is_refused_before_the_run(tmp_path: Path, tokenizer: Any) -> None:
    async with workers(1):
        for number, (rewards, message) in enumerate(FAILING.items()):
            (tmp_path / str(number)).mkdir()
            env = config(tmp_path / str(number), "score", rewards, limit_s=1.0)
            refusal = rf"score of .*my_rewards\.py.* line \d+ of .*data\.jsonl(.|\n)*{message}"
            with pytest.raises(BadInput, match=refusal):
                await first_problem(env, tokenizer).try_rewards()


@pytest.mark.parametrize(
    ("functions", "rewards", "rows", "message"),
    [
        ("nothing", REWARDS, ROWS, "function nothing cannot be loaded from .*my_rewards.py: KeyError: 'nothing'"),
        ("score", "import nowhere", ROWS, "function score cannot .*: ModuleNotFoundError.*my_rewards.py, line 1"),
        ("score", REWARDS, [*ROWS, {"prompt": "no target"}], "line 41 of .*: missing a required argument: 'target'"),
        ("score", "def score(answer, **row): return 1", ROWS, "multiple values for argument 'answer'"),
        ("score", REWARDS, [{"question": "?", "target": "1"}] * 9, "line 1 of .* has no 'prompt'"),
        ("score", REWARDS, [{"prompt": [{"role": "me", "content": "?"}]}] * 2, "line 1 of .*role 'me'"),
    ],
)
def test_functions_and_rows_that_do_not_suit_are_bad_input(
    tmp_path: Path, tokenizer: Any, functions: str, rewards: str, rows: list[Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        load_dataset(config(tmp_path, functions, rewards, rows), EnvContext(tokenizer, 0, 2))
