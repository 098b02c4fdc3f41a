"""An agent that asks sub-agents and shortens its history, which a run trains. Only `run` in it knows of training.

PYTHONPATH=examples/agents uv run rl --env.id agent:delegating:play --model.name Qwen/Qwen3-0.6B ...

Each sub-agent and each shortened history is a conversation of its own, and so a segment of the trajectory.
"""

import asyncio
import json
import random

from openai import AsyncOpenAI

TURNS, LONGEST = 8, 6
TOOL = {
    "name": "helper",
    "description": "Gives one small calculation to a helper, who sees nothing else.",
    "parameters": {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]},
}


def problems(split: str, seed: int, count: int = 1000) -> list[list[int]]:
    """Returns the sides of rectangles, two for each."""
    rng = random.Random(f"{split}:{seed}")
    return [[rng.randrange(2, 20) for _ in range(6)] for _ in range(count)]


async def play(run):
    """Answers one question. Returns the reward, and how often there was a helper, and a history that was too long."""
    sides, counts = run.problem, {"helpers": 0, "compactions": 0}
    areas = [width * height for width, height in zip(sides[::2], sides[1::2], strict=True)]
    sizes = ", ".join(f"{width} x {height}" for width, height in zip(sides[::2], sides[1::2], strict=True))
    task = user(f"Rectangles of {sizes}: what is their area together? Ask helpers, and then say the number alone.")
    async with AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:

        async def ask(messages, **body):
            answer = await client.chat.completions.create(model=run.model, messages=messages, **body)
            return answer.choices[0].message

        async def helped(call):
            counts["helpers"] += 1
            try:
                said = (await ask([user(str(json.loads(call.function.arguments)["question"]))])).content
            except (KeyError, TypeError, ValueError) as error:
                said = f"error: {error!r}"
            return {"role": "tool", "tool_call_id": call.id, "content": said}

        messages, tools = [task], [{"type": "function", "function": TOOL}]
        for _ in range(TURNS):
            if len(messages) > LONGEST:
                counts["compactions"] += 1
                notes = await ask([*messages, user("Note all that you know so far.")], tools=tools)
                messages = [task, user(f"Your notes: {notes.content}")]
            said = await ask(messages, tools=tools)
            if not said.tool_calls:
                return float(said.content.strip() == str(sum(areas))), counts
            messages += [said.model_dump(exclude_none=True), *await asyncio.gather(*map(helped, said.tool_calls))]
    return 0.0, counts


def user(text: str):
    """Returns a message of the user."""
    return {"role": "user", "content": text}
