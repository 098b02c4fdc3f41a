"""An agent that does at random what agents do, over connections that break, and keeps its own record: sub-agents,
shortened histories, several answers, calls at the same time, prompts without messages, retries."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
from service_support import ScriptedSampler

TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
MOMENT_S = 0.01
"""For the service to see that a connection has broken."""


def asks(text: str) -> Any:
    return {"role": "user", "content": text}


class Impatient(openai.AsyncOpenAI):
    """Asks again at once."""

    def _calculate_retry_timeout(self, *given: Any) -> float:
        return 0.0


class Lossy(httpx.AsyncHTTPTransport):
    """Loses some connections: before the request, while it is being answered, or with the whole answer."""

    def __init__(self, rng: random.Random, sampler: ScriptedSampler) -> None:
        super().__init__()
        self.rng, self.sampler = rng, sampler
        self.sampler.hold = self.open = asyncio.Event()
        self.open.set()
        self.lost: Counter[str] = Counter()
        self.gives_up = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        last = request.headers["x-stainless-retry-count"] == "2"
        fate = "here" if last else self.rng.choice(["here", "here", "here", "unsent", "broken", "unheard"])
        fate = "broken" if self.gives_up else fate
        self.lost[fate] += 1
        if fate == "unsent":
            raise httpx.ConnectError("no connection")
        if fate == "broken":
            await self.broken(request)
        answer = await super().handle_async_request(request)
        if fate == "unheard":
            await answer.aread()
            await answer.aclose()
            raise httpx.ReadError("the connection broke with the answer")
        return answer

    async def broken(self, request: httpx.Request) -> None:
        """Breaks the connection when the answer is about to be sampled."""
        before = len(self.sampler.requests)
        self.open.clear()
        asking = asyncio.ensure_future(super().handle_async_request(request))
        for _ in range(50):  # or when it is clear that another request is in its way
            await asyncio.sleep(MOMENT_S / 10)
            if len(self.sampler.requests) > before or asking.done():
                break
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.sleep(MOMENT_S)
        self.open.set()
        raise httpx.ReadError("the connection broke")


class Agent:
    """Does at random what agents do, and keeps the token ids that its client was given."""

    def __init__(self, rng: random.Random, client: openai.AsyncOpenAI, lossy: Lossy) -> None:
        self.rng, self.client, self.lossy = rng, client, lossy
        self.heard: set[tuple[int, ...]] = set()
        self.conversations: list[list[Any]] = []
        self.prompts: list[str | list[int]] = []
        self.words = 0

    async def ask(self, messages: list[Any], n: int = 1) -> list[Any]:
        body: Any = {"model": "policy", "messages": messages, "n": n, "tools": [TOOL]}
        answer = await self.client.chat.completions.create(**body, extra_body={"return_token_ids": True})
        self.heard |= {tuple(choice.token_ids) for choice in answer.choices}  # type: ignore[attr-defined]
        said = [choice.message.model_dump(exclude_none=True) for choice in answer.choices]
        self.conversations += [[*messages, each] for each in said]
        return said

    async def complete(self) -> None:
        """Asks without messages: by a text or by token ids, from the beginning or behind an earlier answer."""
        self.words += 1
        before = self.rng.choice(["", *self.prompts])
        more = f"prompt {self.words}"
        prompt: Any = before + more if isinstance(before, str) else [*before, *self.encode(more)]
        n = self.rng.choice([1, 1, 2])
        body: Any = {"model": "policy", "prompt": prompt, "max_tokens": 100, "n": n}
        answer = await self.client.completions.create(**body, extra_body={"return_token_ids": True})
        for choice in answer.choices:
            tokens, ids = choice.token_ids, choice.prompt_token_ids  # type: ignore[attr-defined]
            self.heard.add(tuple(tokens))
            self.prompts += [[*ids, *tokens], *([prompt + choice.text] if isinstance(prompt, str) else [])]

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.lossy.sampler.tokenizer.encode(text, add_special_tokens=False)
        return found

    def question(self) -> Any:
        self.words += 1
        return asks(f"question {self.words}")

    async def step(self) -> None:
        act = self.rng.choice(
            ["begin", "continue", "continue", "best", "again", "shorten", "together", "give up", "complete"]
        )
        before = self.rng.choice(self.conversations) if self.conversations else []
        if act == "begin":
            await self.ask([self.question()])
        elif act == "continue":
            await self.continues(before)
        elif act == "best":
            await self.ask([*before, *self.results(before), self.question()], n=4)
        elif act == "again" and before:
            await self.ask(before[:-1])
        elif act == "shorten":
            await self.ask([*before[:1], asks("notes"), self.question()])
        elif act == "together":
            await asyncio.gather(*(self.ask([self.question()]) for _ in range(3)))
        elif act == "complete":
            await self.complete()
        elif act == "give up":
            await self.gives_up([*before, *self.results(before), self.question()])

    async def continues(self, before: list[Any]) -> None:
        """Calls tools, each of which is a sub-agent, and asks on."""
        calls = before[-1].get("tool_calls", []) if before else []
        await asyncio.gather(*(self.ask([self.question()]) for _ in calls))
        await self.ask([*before, *self.results(before), self.question()])

    def results(self, before: list[Any]) -> list[Any]:
        calls = before[-1].get("tool_calls", []) if before else []
        return [{"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in calls]

    async def gives_up(self, messages: list[Any]) -> None:
        self.lossy.gives_up = True
        with pytest.raises(openai.APIConnectionError):
            await self.client.with_options(max_retries=0).chat.completions.create(
                model="policy", messages=messages, tools=[TOOL]
            )
        self.lossy.gives_up = False


def text(number: int) -> str:
    """Every third answer calls tools, two at the same time."""
    return f"text {number}" + (f"\n{CALL}\n{CALL}" if number % 3 == 2 else "")
