"""An agent with OpenAI's client and a tool, which a run trains. Nothing in it but `run` knows of training.

PYTHONPATH=examples/agents uv run rl --env.id agent:calculator:play --model.name Qwen/Qwen3-0.6B ...
"""

import json
import random

from openai import AsyncOpenAI

TURNS = 4
TOOL = {
    "name": "multiply",
    "description": "Multiplies two whole numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def problems(split: str, seed: int, count: int = 1000) -> list[tuple[int, int]]:
    """Returns pairs of factors."""
    rng = random.Random(f"{split}:{seed}")
    return [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(count)]


async def play(run):
    """Answers one question. Returns the reward, and how often the tool was called."""
    (a, b), calls = run.problem, 0
    messages = [{"role": "user", "content": f"What is {a} * {b}? Use the tool, and then say the number alone."}]
    async with AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        for _ in range(TURNS):
            answer = await client.chat.completions.create(
                model=run.model, messages=messages, tools=[{"type": "function", "function": TOOL}]
            )
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return float(said.content.strip() == str(a * b)), {"tool_calls": calls}
            for call in said.tool_calls:
                calls += 1
                messages.append({"role": "tool", "tool_call_id": call.id, "content": multiply(call.function.arguments)})
    return 0.0, {"tool_calls": calls}


def multiply(arguments: str) -> str:
    """Returns the product, or what is wrong with the arguments."""
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) * int(given["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"
