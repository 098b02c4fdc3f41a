"""Arithmetic with a tool: the model may call a calculator, and then answers with a number.

PYTHONPATH=examples/envs uv run rl --env.id arithmetic:Arithmetic --model.name Qwen/Qwen3-0.6B ...

user       What is (37 - 12) * 48?
assistant  <tool_call> calculator(expression = "37 - 12") </tool_call>
tool       25
assistant  1200                                             reward 1
"""

import ast
import operator
import random
from dataclasses import dataclass
from functools import partial

from orchestrator.envs.text import GeneratedDataset
from orchestrator.message_env import MessageEnv, MessageEnvGroup, MessageStep
from orchestrator.tools import Tool, Toolbox, ToolError

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LONGEST = 200
"""Most characters of an expression, which bounds its depth and its value too."""
CALCULATOR = {
    "name": "calculator",
    "description": "Computes an expression of whole numbers with + - * and brackets.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


def calculate(expression: str) -> int:
    """Returns the value of an expression, no part of which is run. Raises ToolError, whose text the model reads."""
    if not isinstance(expression, str) or len(expression) > LONGEST:
        raise ToolError(f"the argument `expression` must be a string of at most {LONGEST} characters")
    try:
        return value_of(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ToolError(f"this is no expression: {error.msg}") from None


def value_of(node: ast.expr) -> int:
    """Returns the value of a part of an expression."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ToolError(f"unexpected: {ast.unparse(node)}")


async def calculator(expression: str) -> str:
    """Answers a call of the tool."""
    return str(calculate(expression))


TOOLS = Toolbox(Tool(CALCULATOR, calculator))


def draw_expression(rng: random.Random, operations: int, largest: int) -> str:
    """Returns an expression with this number of operations."""
    if not operations:
        return str(rng.randint(0, largest))
    left = rng.randrange(operations)
    sides = [draw_expression(rng, count, largest) for count in (left, operations - 1 - left)]
    first, second = (f"({side})" if " " in side else side for side in sides)
    return f"{first} {rng.choice('+-*')} {second}"


class ArithmeticEnv(MessageEnv):
    """One problem, in at most `max_turns` answers."""

    tools = TOOLS.specs

    def __init__(self, expression, max_turns):
        self.expression, self.max_turns, self.turns = expression, max_turns, 0

    async def initial_messages(self):
        instruction = "Answer with the number alone. You may use the calculator first."
        return [
            {"role": "system", "content": instruction},
            {"role": "user", "content": f"What is {self.expression}?"},
        ]

    async def step(self, message):
        self.turns += 1
        calls = message.get("tool_calls", [])
        if calls and self.turns < self.max_turns:
            answers = await TOOLS.answer(calls)
            return MessageStep(0.0, False, answers.messages, answers.metrics)
        success = float(not calls and message["content"].strip() == str(calculate(self.expression)))
        logs = {"problem": self.expression, "answer": message["content"]}
        return MessageStep(success, True, metrics={"success": success}, logs=logs)

    def known_answer(self):
        return str(calculate(self.expression))

    def state_dict(self):
        return {"turns": self.turns}

    async def load_state_dict(self, state):
        self.turns = state["turns"]


@dataclass(kw_only=True)
class Arithmetic(GeneratedDataset):
    """`num_batches` batches of `batch_size` expressions of `operations` operations on numbers up to `largest`."""

    name = "arithmetic"

    operations: int = 2
    largest: int = 99
    max_turns: int = 4

    def builders(self, numbers):
        expressions = [
            self.draw(number, lambda rng: draw_expression(rng, self.operations, self.largest)) for number in numbers
        ]
        games = [partial(ArithmeticEnv, expression, self.max_turns) for expression in expressions]
        return [MessageEnvGroup(game, self.context.renderer, self.context.group_size) for game in games]
