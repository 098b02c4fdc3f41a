"""The environments of examples/envs: each builds its problems and plays an episode, and the old ids name them."""

import asyncio
from typing import Any

import arithmetic
import pytest
from chat_support import Policy
from renderer_support import characters

from orchestrator.env import MOVED, EnvContext, RLDataset, Trajectory, load_dataset
from orchestrator.rollout import RolloutKey, RolloutLimits, run_rollout
from orchestrator.tools import ToolError
from trireme.config.schema import EnvConfig, SamplingConfig
from trireme.core.errors import BadInput


def dataset(env_id: str, split: Any = "train", **args: Any) -> RLDataset:
    return load_dataset(EnvConfig(id=env_id, args=args), EnvContext(characters(), 0, 2, split))


def play(env_id: str, texts: list[str], **args: Any) -> tuple[Trajectory, list[str]]:
    """An episode of the second problem in which the policy answers with these texts; and its prompts."""
    tokenizer = characters()
    context = EnvContext(tokenizer, 0, 2)
    builder: Any = load_dataset(EnvConfig(id=env_id, args=args), context).get_batch(0)[1]
    policy = Policy([[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts])
    key, limits = RolloutKey(env_id, "0.0.1", 0, 0, "0"), RolloutLimits(1000, 10_000, decode=tokenizer.decode)

    async def episode() -> Trajectory:
        env = await builder.make_env(0)
        return await run_rollout(env, policy.sample, key, limits, SamplingConfig(max_tokens=1000), 0)

    return asyncio.run(episode()), [tokenizer.decode(request.prompt) for request in policy.requests]


def call(expression: str) -> str:
    return f' <tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def test_reverse() -> None:
    trajectory, (prompt,) = play("reverse:Reverse", ["x"])
    text = prompt.removeprefix("Reverse: ").removesuffix("\n")
    assert trajectory.reward < 1
    assert play("reverse:Reverse", [text[::-1]])[0].reward == 1
    lengths = {len(b.make().question.target) for b in dataset("reverse:Reverse", "eval", max_letters=4).get_batch(0)}  # type: ignore[attr-defined]
    assert lengths == {3, 4}


def test_arithmetic() -> None:
    (prompt,) = play("arithmetic:Arithmetic", ["no"])[1]
    question = prompt.rpartition("What is ")[2].partition("?")[0]
    value = arithmetic.calculate(question)
    trajectory, prompts = play("arithmetic:Arithmetic", [call(question), f" {value}"])
    assert prompts[1].endswith(f"Tool: {value}\n\nAssistant:")
    assert [t.metrics.get("tool_calls") for t in trajectory.transitions] == [1, None]
    assert (trajectory.reward, trajectory.transitions[1].metrics["success"]) == (1, 1)
    assert play("arithmetic:Arithmetic", [f" {value + 1}"])[0].reward == 0
    assert play("arithmetic:Arithmetic", [call("1"), call("1")], max_turns=2)[0].reward == 0, "turns run out"


def test_a_game_with_the_calculator_continues_after_a_resume() -> None:
    env = arithmetic.ArithmeticEnv("1 + 1", 4)
    asyncio.run(env.load_state_dict({"turns": 2}))
    assert env.state_dict() == {"turns": 2}


@pytest.mark.parametrize(("expression", "value"), [("(37 - 12) * 48", 1200), ("-2 * -(3 + 4)", 14), (" 7 ", 7)])
def test_values(expression: str, value: int) -> None:
    assert arithmetic.calculate(expression) == value


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
