"""An agent with OpenAI's client and a tool, which a run trains. Nothing in it but `run` knows of training.

PYTHONPATH=examples/agents uv run rl --env.id agent:calculator:play --model.name Qwen/Qwen3-0.6B ...
"""

import json
import random

from openai import AsyncOpenAI

FACTORS = {name: {"type": "integer"} for name in "ab"}
PARAMETERS = {"type": "object", "properties": FACTORS, "required": ["a", "b"]}
TOOL = {"name": "multiply", "description": "Multiplies two whole numbers.", "parameters": PARAMETERS}


def problems(split: str, seed: int, count: int = 1000) -> list[tuple[int, int]]:
    """Returns pairs of factors."""
    rng = random.Random(f"{split}:{seed}")
    return [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(count)]


async def play(run):
    """Answers one question in at most four turns. Returns the reward."""
    a, b = run.problem
    messages = [{"role": "user", "content": f"What is {a} * {b}? Use the tool, and then say the number alone."}]
    own = {"model": run.model, "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
    async with AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        for _ in range(4):
            said = (await client.chat.completions.create(**own)).choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return float(said.content.strip() == str(a * b))
            for call in said.tool_calls:
                try:
                    given = json.loads(call.function.arguments)
                    result = str(int(given["a"]) * int(given["b"]))
                except (KeyError, TypeError, ValueError) as error:
                    result = f"error: {error!r}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
