"""The tutorial's code is code: what docs/rewards.md and docs/environments.md show, and their examples, run."""

import asyncio
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import arithmetic
import pytest
from chat_support import Policy, rollout
from orchestrator_fakes import trajectory_to_data
from renderer_support import characters

from orchestrator.env import MOVED, EnvContext, RLDataset, Trajectory, load_dataset
from orchestrator.rollout import RolloutLimits
from orchestrator.tools import ToolError
from trireme.config.schema import EnvConfig
from trireme.core.errors import BadInput

ROOT = Path(__file__).parents[2]
DOCUMENT = "".join((ROOT / "docs" / page).read_text() for page in ("rewards.md", "environments.md"))
FILES: dict[str, str] = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL))


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tutorial's files, in a directory of Python's path."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


LIMITS = RolloutLimits(1000, 10_000, decode=characters().decode)


def dataset(env_id: str, split: Any = "train", **args: Any) -> RLDataset:
    return load_dataset(EnvConfig(id=env_id, args=args), EnvContext(characters(), 0, 2, split))


def play(problem: Any, texts: Sequence[str]) -> tuple[Trajectory, list[str]]:
    """One episode in which the policy says these texts; and its prompts."""
    policy = Policy([[*characters().encode(text), characters().eos_token_id] for text in texts])

    async def episode() -> tuple[Trajectory, list[str]]:
        env = await problem.make_env(0)
        trajectory = await rollout(env, policy, LIMITS)
        await env.close()
        return trajectory, [characters().decode(request.prompt) for request in policy.requests]

    return asyncio.run(episode())


@pytest.mark.parametrize(("answer", "reward", "exact"), [("abc", 1.0, 1.0), ("abcd", 2 / 3, 0.0), ("", 0.0, 0.0)])
def test_one_question_one_answer(answer: str, reward: float, exact: float) -> None:
    trajectory, prompts = play(dataset("letters:Letters", longest=3).get_batch(0)[2], [answer])
    assert prompts == ["Write 3 letters: "]
    assert trajectory.reward == pytest.approx(reward)
    assert trajectory.transitions[0].metrics == {"exact": exact}


def higher_lower(texts: Sequence[str]) -> tuple[Trajectory, list[str]]:
    (problem, *_) = [chat for chat in dataset("higher_lower:HigherLower").get_batch(0) if chat.make.args == (9,)]
    return play(problem, texts)


def test_a_chat_of_several_turns() -> None:
    trajectory, prompts = higher_lower([" 5", " 15", " 9"])
    assert trajectory.reward == pytest.approx(1 / 3)
    assert prompts[-1] == (
        "User: Guess my number, from 1 to 20. Answer with digits.\n\nAssistant: 5<eos>\n\nUser: Higher.\n\n"
        "Assistant: 15<eos>\n\nUser: Lower.\n\nAssistant:"
    )
    assert len(trajectory_to_data(trajectory, 1.0, 1.0)) == 1

    for texts in (["what?"], ["<think>"], [" 1", " 2", " 3", " 4", " 5"]):
        trajectory, _ = higher_lower(texts)
        assert (trajectory.reward, len(trajectory.transitions)) == (0, len(texts)), "it ends badly"


def test_a_program_that_a_model_writes_is_run() -> None:
    problem = dataset("run_code:Programs").get_batch(0)[0]
    rewards = [play(problem, [program])[0].reward for program in (" print(sum(range(101)))", " print(1)", " 1 /")]
    assert rewards == [1, 0, 0]


def example(env_id: str, texts: Sequence[str], **args: Any) -> tuple[Trajectory, list[str]]:
    return play(dataset(env_id, **args).get_batch(0)[1], texts)


def call(expression: str) -> str:
    return f' <tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def test_reverse() -> None:
    trajectory, (prompt,) = example("reverse:Reverse", ["x"])
    text = prompt.removeprefix("Reverse: ").removesuffix("\n")
    assert trajectory.reward < 1
    assert example("reverse:Reverse", [text[::-1]])[0].reward == 1
    lengths = {len(b.make().question.target) for b in dataset("reverse:Reverse", "eval", max_letters=4).get_batch(0)}  # type: ignore[attr-defined]
    assert lengths == {3, 4}


def test_arithmetic() -> None:
    (prompt,) = example("arithmetic:Arithmetic", ["no"])[1]
    question = prompt.rpartition("What is ")[2].partition("?")[0]
    value = arithmetic.calculate(question)
    trajectory, prompts = example("arithmetic:Arithmetic", [call(question), f" {value}"])
    assert prompts[1].endswith(f"Tool: {value}\n\nAssistant:")
    assert [t.metrics.get("tool_calls") for t in trajectory.transitions] == [1, None]
    assert (trajectory.reward, trajectory.transitions[1].metrics["success"]) == (1, 1)
    assert example("arithmetic:Arithmetic", [f" {value + 1}"])[0].reward == 0
    assert example("arithmetic:Arithmetic", [call("1"), call("1")], max_turns=2)[0].reward == 0, "turns run out"
    values = {"(37 - 12) * 48": 1200, "-2 * -(3 + 4)": 14, " 7 ": 7}
    assert {expression: arithmetic.calculate(expression) for expression in values} == values
    env = arithmetic.ArithmeticEnv("1 + 1", 4)
    asyncio.run(env.load_state_dict({"turns": 2}))
    assert env.state_dict() == {"turns": 2}


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "1 / 0", "9 ** 9 ** 9", "__import__('os')", "x", "1.5", "True", "(" * 199, "-" * 199, "1" * 201, ["1"]],
)
def test_calculator_refuses_with_a_text_for_the_model(expression: Any) -> None:
    with pytest.raises(ToolError):
        arithmetic.calculate(expression)


@pytest.mark.parametrize("env_id", MOVED)
def test_an_old_id_names_the_example(env_id: str) -> None:
    file, example = MOVED[env_id]
    with pytest.raises(BadInput, match=rf"env\.id = {env_id}, which is not built in\n.*{example}.*{file}"):
        dataset(env_id)
    assert len(dataset(example)) == 1000
