"""The guessing game as an agent plays it, with OpenAI's client, and a format in which its chat has the same tokens as
the game of `orchestrator.envs.guess`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI

from orchestrator.envs.agent import AgentRun
from orchestrator.envs.guess import COST_OF_A_TURN, DIGITS, PROMPT, hint
from trireme.renderers import Message, ToolSpec
from trireme.renderers.base import TextRenderer
from trireme.renderers.history import HistoryRule

MAX_TURNS = 4


class Bare(TextRenderer):
    """Writes the contents of messages and nothing else; an answer ends with the end of sequence, if it has one."""

    def __init__(self, tokenizer: Any, rule: HistoryRule, enable_thinking: bool | None = None) -> None:
        super().__init__(tokenizer, [tokenizer.eos_token_id], rule)
        self._end = str(tokenizer.eos_token)

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], generate: bool) -> str:
        return "".join(m["content"] + self._end * (m["role"] == "assistant") for m in messages)

    def stop_condition(self) -> tuple[int | str, ...]:
        return ()  # the model's end of sequence always stops

    def parse_text(self, text: str) -> tuple[Message, bool]:
        return {"role": "assistant", "content": text}, True

    def _followed_by(self, own: list[int], after: str) -> list[int]:
        return own + self.encode(after.removeprefix(self._end))


def problems(split: str, seed: int, count: int = 60) -> list[str]:
    """Returns secrets in such an order that, shuffled as an agent's problems are, they are those of `guess`."""
    secrets = [random.Random(f"guess:{seed}:{split}:{number}").choice(DIGITS) for number in range(count)]
    order = list(range(count))
    random.Random(f"agent:{seed}").shuffle(order)
    return [secrets[order.index(number)] for number in range(count)]


async def play(run: AgentRun) -> tuple[float, dict[str, float]]:
    """Plays one game, as `GuessEnv` does."""
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    async with AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        for guesses in range(MAX_TURNS):
            answer = await client.chat.completions.create(model=run.model, messages=messages)
            said, finished = answer.choices[0].message.content or "", answer.choices[0].finish_reason == "stop"
            if finished and said == run.problem:
                return 1 - COST_OF_A_TURN * guesses, {"success": 1.0}
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": hint(run.problem, said if finished else "")})
    return 0.0, {"success": 0.0}
