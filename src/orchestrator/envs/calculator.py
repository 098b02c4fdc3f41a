"""Arithmetic with a tool: the assistant may call a calculator as often as its turns allow, then answers with a number.

user       What is (37 - 12) * 48?
assistant  <tool_call> calculator(expression = "(37 - 12) * 48") </tool_call>
tool       1200
assistant  1200                                             reward 1
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from orchestrator.env import EnvGroupBuilder
from orchestrator.envs.expressions import MAX_DEPTH, MAX_LENGTH, CalculationError, calculate, show
from orchestrator.envs.text import GeneratedDataset
from orchestrator.message_env import MessageEnv, MessageEnvGroup, MessageStep
from orchestrator.tools import Tool, Toolbox, ToolError
from trireme.renderers import Message, ToolSpec

CALCULATOR = ToolSpec(
    name="calculator",
    description="Computes an arithmetic expression: + - * / // % **, brackets, decimal numbers.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "For example (3 + 4) * 5"}},
        "required": ["expression"],
    },
)


async def _calculator(expression: object) -> str:
    """Returns the value of an expression, which takes less than a millisecond."""
    if not isinstance(expression, str):
        raise ToolError("the argument `expression` must be a string")
    try:
        return show(calculate(expression))
    except CalculationError as error:
        raise ToolError(str(error)) from None


TOOLS = Toolbox(Tool(CALCULATOR, _calculator))
INSTRUCTION = "Answer with one number, in digits. You may use the calculator first."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?", re.ASCII)
WHOLE_NUMBER = re.compile(r"(-?)0*(\d{1,200})(?:\.0+)?", re.ASCII)


def _expression(rng: random.Random, operations: int, largest: int) -> str:
    if not operations:
        return str(rng.randint(0, largest))
    left = rng.randrange(operations)
    sides = (_expression(rng, n, largest) for n in (left, operations - 1 - left))
    a, b = (f"({side})" if " " in side else side for side in sides)
    return f"{a} {rng.choice('+-*')} {b}"


def stated_number(text: str) -> str | None:
    """Returns the last number in a text, without needless signs; None without one, or if it is not whole."""
    found = NUMBER.findall(text)
    match = WHOLE_NUMBER.fullmatch(found[-1].replace(",", "")) if found else None
    if match is None:
        return None
    return match[2] if match[2] == "0" else match[1] + match[2]


@dataclass
class CalculatorEnv(MessageEnv):
    """One problem. A call that is malformed, or has no value, is answered with the reason."""

    expression: str
    max_turns: int
    """Most messages of the assistant. If the last one still calls a tool, the episode ends without an answer."""
    tools: Sequence[ToolSpec] = tuple(TOOLS.specs)
    _turns: int = field(default=0, init=False)

    async def initial_messages(self) -> Sequence[Message]:
        return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": f"What is {self.expression}?"}]

    async def step(self, message: Message) -> MessageStep:
        calls = message.get("tool_calls", [])
        if not calls:
            target = show(calculate(self.expression))
            success = float(stated_number(message["content"]) == target)
            logs = {"problem": self.expression, "answer": message["content"], "target": target}
            return MessageStep(success, True, metrics={"success": success}, logs=logs)
        answers = await TOOLS.answer(calls)
        return self._next_turn(answers.messages, answers.metrics)

    async def unreadable(self, message: Message, cut_off: bool) -> MessageStep:
        if cut_off:
            return MessageStep(0.0, True, metrics={"success": 0.0}, logs={"problem": self.expression})
        text = "error: this is no call of a tool with a name and arguments, as JSON"
        return self._next_turn([{"role": "tool", "name": CALCULATOR["name"], "content": text}], {})

    def state_dict(self) -> Mapping[str, Any]:
        return {"turns": self._turns}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._turns = state["turns"]

    def _next_turn(self, said: list[Message], metrics: dict[str, float]) -> MessageStep:
        self._turns += 1
        if self._turns < self.max_turns:
            return MessageStep(0.0, False, said, metrics)
        return MessageStep(0.0, True, metrics=metrics | {"success": 0.0}, logs={"problem": self.expression})


@dataclass(kw_only=True)
class CalculatorDataset(GeneratedDataset):
    """`num_batches` batches of `batch_size` expressions of `operations` operations on numbers up to `largest`.

    Raises ValueError for sizes below 1, and for expressions that the calculator itself would refuse.
    """

    name = "calculator"

    operations: int = 2
    largest: int = 99
    max_turns: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = (self.operations + 1) * len(str(self.largest)) + self.operations * len(" + ()")
        if longest > MAX_LENGTH or self.operations >= MAX_DEPTH:
            raise ValueError(
                f"operations = {self.operations} on numbers up to {self.largest} make expressions of up to {longest} "
                f"characters; the calculator takes {MAX_LENGTH}, and less than {MAX_DEPTH} operations within each other"
            )

    def expression(self, index: int) -> str:
        """Returns the expression of problem `index`."""
        return self.draw(index, lambda rng: _expression(rng, self.operations, self.largest))

    def builders(self, numbers: Sequence[int]) -> list[EnvGroupBuilder]:
        made = [partial(CalculatorEnv, self.expression(number), self.max_turns) for number in numbers]
        return [MessageEnvGroup(make, self.context.renderer, self.context.group_size) for make in made]
