"""The calculator: its arithmetic, which ends within its limits whatever it is given, and the environment around it."""

from __future__ import annotations

import asyncio
import random
import time
from fractions import Fraction
from typing import Any

import pytest
from chat_support import Policy, ended
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestrator_fakes import trajectory_to_data
from renderer_support import QWEN3, bpe, characters

from orchestrator.env import EnvContext, Trajectory, load_dataset
from orchestrator.envs.calculator import CalculatorDataset, CalculatorEnv, stated_number
from orchestrator.envs.expressions import MAX_LENGTH, CalculationError, calculate, show
from orchestrator.envs.text import is_held_out
from orchestrator.rollout import RolloutKey, RolloutLimits, run_rollout
from trireme.config.schema import EnvConfig, RendererConfig, SamplingConfig
from trireme.core.errors import BadInput

# ---- arithmetic


def problem(seed: int, index: int, split: Any, operations: int, largest: int) -> str:
    context = EnvContext(None, seed, group_size=1, split=split)
    return CalculatorDataset(context, operations=operations, largest=largest).expression(index)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1+2)*3", "9"),
        ("8 - 3 - 2", "3"),
        ("2 ** 3 ** 2", "512"),
        ("2^10", "1024"),
        ("-2 ** 2", "-4"),
        ("2 ** -2", "0.25"),
        ("--3 + +4", "7"),
        ("7 / 2", "3.5"),
        ("1 / 3", "0.333333333333"),
        ("7 // 2 + 7 % 2", "4"),
        ("-7 // 2", "-4"),
        ("0.1 + 0.2", "0.3"),
        (".5 * 4", "2"),
        ("1. + 1", "2"),
        ("2 ** 4000 // 2 ** 3999", "2"),
        (" 1\t+\n1 ", "2"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert show(calculate(expression)) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "ends too early"),
        ("1 +", "ends too early"),
        ("1 2", "unexpected '2'"),
        ("(1", "not closed"),
        (")", r"unexpected '\)'"),
        ("*1", r"unexpected '\*'"),
        (".", r"unexpected '\.'"),
        ("x + 1", "unexpected 'x'"),
        ("__import__('os')", "unexpected '_'"),
        ("1e999", "unexpected 'e'"),
        ("١ + ١", "unexpected"),
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("1 // (2 - 2)", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "whole number"),
        ("9 ** 9 ** 9", "too large"),
        ("9 ** 9 ** 9 ** 9 ** 9", "too large"),
        ("2 ** -99999999999999", "too large"),
        ("(2 ** 4000) * (2 ** 4000)", "too large"),
        ("1" * (MAX_LENGTH + 1), "201 characters"),
        ("(" * MAX_LENGTH, "nest deeper than 20"),
        ("(" * 19 + "1" + ")" * 18, "not closed"),
        ("-" * MAX_LENGTH, "nest deeper"),
        ("2 ** " * 21 + "1", "nest deeper"),
        ("(" * 100_000 + ")" * 100_000, "at most 200"),
    ],
)
def test_what_has_no_value_says_why(expression: str, said: str) -> None:
    with pytest.raises(CalculationError, match=said):
        calculate(expression)


@given(st.text(alphabet="0123456789.+-*/%^() ", max_size=MAX_LENGTH))
@settings(deadline=None)
def test_every_expression_has_a_value_or_an_error(expression: str) -> None:
    try:
        shown = show(calculate(expression))
    except CalculationError:
        return
    assert len(shown) < 1300


NUMBERS = st.integers(0, 99).map(str)
OPERATORS = st.sampled_from(["+", "-", "*"])
EXPRESSIONS = st.recursive(
    NUMBERS, lambda side: st.tuples(side, OPERATORS, side).map(lambda parts: f"({''.join(parts)})"), max_leaves=8
)


@given(EXPRESSIONS)
@settings(deadline=None)
def test_it_agrees_with_python(expression: str) -> None:
    if len(expression) <= MAX_LENGTH:
        assert calculate(expression) == Fraction(eval(expression))


# ---- the environment


def context(split: Any = "train", tokenizer: Any = None, **rendering: Any) -> EnvContext:
    return EnvContext(tokenizer or bpe(QWEN3), 0, 2, split, RendererConfig(**rendering))


def call(expression: str) -> str:
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def play(texts: list[str], expression: str = "(37 - 12) * 48", max_turns: int = 4) -> tuple[Trajectory, list[str]]:
    """The trajectory, and what was said last in each prompt."""
    from orchestrator.message_env import RenderedEnv

    renderer = context(strip_thinking_from_history=False).renderer
    policy = Policy([ended(text, renderer, seed) for seed, text in enumerate(texts)])
    env = RenderedEnv(CalculatorEnv(expression, max_turns), renderer)
    key = RolloutKey("calculator", "0.0.0", 0, 0, "0")
    limits, sampling = RolloutLimits(1000, 10_000), SamplingConfig(max_tokens=1000)
    trajectory = asyncio.run(run_rollout(env, policy.sample, key, limits, sampling, 0))
    prompts = [bpe().decode(request.prompt) for request in policy.requests]
    return trajectory, [prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0] for prompt in prompts]


def test_a_call_is_answered_and_the_answer_graded() -> None:
    trajectory, last = play([call("37 - 12"), f"Now that times 48.\n{call('25 * 48')}", "It is 1,200."])
    assert last == [
        "What is (37 - 12) * 48?",
        "<tool_response>\n25\n</tool_response>",
        "<tool_response>\n1200\n</tool_response>",
    ]
    assert trajectory.reward == 1.0
    metrics = [dict(t.metrics) for t in trajectory.transitions]
    assert metrics[0] == {"parse_error": 0.0, "tool_calls": 1.0, "tool_errors": 0.0, "tool_timeouts": 0.0}
    assert metrics[-1] == {"parse_error": 0.0, "success": 1.0}
    assert len(trajectory_to_data(trajectory, 1.0, 1.0)) == 1, "one training sequence over all turns"


def test_without_a_call_it_is_graded_too() -> None:
    assert play(["1200"])[0].reward == 1.0
    assert play(["1201"])[0].reward == 0.0
    assert play([""])[0].reward == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call("1 / 0"), "error: division by zero"),
        (call("9 ** 9 ** 9"), "error: the result is too large"),
        (call("import os"), "error: unexpected 'i'"),
        ('<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>', "a required argument: 'expression'"),
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": [1]}}\n</tool_call>', "must be a string"),
        ('<tool_call>\n{"name": "shell", "arguments": {}}\n</tool_call>', "there is no tool 'shell'"),
        ("<tool_call>\nno json\n</tool_call>", "this is no call of a tool"),
        ("<tool_call>", "this is no call of a tool"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(text: str, answer: str) -> None:
    trajectory, last = play([text, "1200"])
    assert answer in last[1]
    assert trajectory.reward == 1.0


def test_turns_run_out() -> None:
    trajectory, _ = play([call("1 + 1")] * 3, max_turns=3)
    assert trajectory.reward == 0.0
    assert trajectory.transitions[-1].metrics["success"] == 0.0


def test_an_answer_cut_off_ends_the_episode() -> None:
    env = CalculatorEnv("1 + 1", 4)
    step = asyncio.run(env.unreadable({"role": "assistant", "content": "2"}, cut_off=True))
    assert (step.reward, step.episode_done) == (0.0, True)


@pytest.mark.parametrize(
    ("text", "number"),
    [("It is 12.", "12"), ("1,234", "1234"), ("3 or 4", "4"), ("-0", "0"), ("007", "7"), ("-7.00", "-7"), ("2.5", None),
     ("none", None), ("", None), ("9" * 50_000, None), ("1,2" * 20_000, None)],
)  # fmt: skip
def test_the_last_number_counts(text: str, number: str | None) -> None:
    started = time.monotonic()
    assert stated_number(text) == number
    assert time.monotonic() - started < 60, "does not end"


def test_problems_are_a_function_of_seed_and_index() -> None:
    train = [problem(0, i, "train", 2, 99) for i in range(200)]
    assert train == [problem(0, i, "train", 2, 99) for i in range(200)]
    assert train != [problem(1, i, "train", 2, 99) for i in range(200)]
    assert train[0] == "27 + (67 - 14)", "problems must not change between versions: runs resume on them"
    assert not any(map(is_held_out, train))
    assert all(is_held_out(problem(0, i, "eval", 2, 99)) for i in range(50))
    assert {op for e in train for op in "+-*" if op in e} == {"+", "-", "*"}


def test_the_dataset_is_built_in() -> None:
    dataset = load_dataset(EnvConfig(id="calculator", args={"batch_size": 3, "num_batches": 2}), context())
    assert len(dataset) == 2
    envs = asyncio.run(dataset.get_batch(1)[2].make_envs())
    prompt, stop = asyncio.run(envs[1].initial_observation())
    assert len(envs) == 2
    assert bpe().decode(prompt).endswith(f"What is {problem(0, 5, 'train', 2, 99)}?<|im_end|>\n<|im_start|>assistant\n")
    assert stop == context().renderer.stop_condition()


def test_it_works_with_the_tokenizer_that_ships() -> None:
    dataset = CalculatorDataset(context(tokenizer=characters()))
    (env, _) = asyncio.run(dataset.get_batch(0)[0].make_envs())
    prompt, stop = asyncio.run(env.initial_observation())
    assert characters().decode(prompt).endswith("\n\nAssistant:")
    assert stop == (1, "\n\nUser:", "\n\nSystem:", "\n\nTool:")


@pytest.mark.parametrize(
    "args", [{"operations": 0}, {"largest": 0}, {"max_turns": 0}, {"operations": 30}, {"digits": 3}]
)
def test_bad_arguments_are_bad_input(args: dict[str, int]) -> None:
    with pytest.raises(BadInput, match=r"env\.args"):
        load_dataset(EnvConfig(id="calculator", args=args), context())


@given(st.integers(1, 18), st.integers(1, 999), st.integers(0, 10**6))
@settings(deadline=None)
def test_its_own_problems_can_be_calculated(operations: int, largest: int, index: int) -> None:
    random_state = random.getstate()
    assert isinstance(calculate(problem(0, index, "train", operations, largest)), Fraction)
    assert random.getstate() == random_state
