"""An agent with OpenAI's client: two turns of one conversation, and a second opinion on the first."""

import random
from typing import Any

from openai import AsyncOpenAI

from orchestrator.envs.agent import AgentRun


def problems(split: str, seed: int) -> list[str]:
    """Returns numbers of six digits."""
    rng = random.Random(f"{split}:{seed}")
    return [f"{rng.randrange(10**6):06}" for _ in range(50)]


async def play(run: AgentRun) -> tuple[float, dict[str, float]]:
    """Returns the share of digits in the three answers."""
    messages: list[Any] = [{"role": "user", "content": f"Sort: {run.problem}"}]
    async with AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:

        async def ask(conversation: list[Any]) -> str:
            answer = await client.chat.completions.create(model=run.model, messages=conversation, max_tokens=6)
            return answer.choices[0].message.content or ""

        first, second = await ask(messages), await ask(messages)
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Again:"}]
        text = first + second + await ask(messages)
    return sum(letter.isdigit() for letter in text) / 18, {"letters": float(len(text))}
