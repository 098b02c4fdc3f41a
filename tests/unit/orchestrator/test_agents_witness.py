"""Agents against a witness: sub-agents, shortened histories, several answers, calls at the same time, lost connections
and retries in any order, with OpenAI's client. What is trained is what was sampled and delivered, each token once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
from agents_support import Play, Rollout, rollout, trained, user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.env import AgentEnv
from trireme.core.agents import AgentAccess

TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
MOMENT_S = 0.01
"""For the service to see that a connection has broken."""


class Impatient(openai.AsyncOpenAI):
    """Asks again at once."""

    def _calculate_retry_timeout(self, *given: Any) -> float:
        return 0.0


class Lossy(httpx.AsyncHTTPTransport):
    """Loses some connections: before the request, while it is being answered, or with the whole answer."""

    def __init__(self, rng: random.Random, run: Rollout) -> None:
        super().__init__()
        self.rng, self.sampler = rng, run.sampler
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
        self.words = 0

    async def ask(self, messages: list[Any], n: int = 1) -> list[Any]:
        body: Any = {"model": "policy", "messages": messages, "n": n, "tools": [TOOL]}
        answer = await self.client.chat.completions.create(**body, extra_body={"return_token_ids": True})
        self.heard |= {tuple(choice.token_ids) for choice in answer.choices}  # type: ignore[attr-defined]
        said = [choice.message.model_dump(exclude_none=True) for choice in answer.choices]
        self.conversations += [[*messages, each] for each in said]
        return said

    def question(self) -> Any:
        self.words += 1
        return user(f"question {self.words}")

    async def step(self) -> None:
        act = self.rng.choice(["begin", "continue", "continue", "best", "again", "shorten", "together", "give up"])
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
            await self.ask([*before[:1], user("notes"), self.question()])
        elif act == "together":
            await asyncio.gather(*(self.ask([self.question()]) for _ in range(3)))
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


class Plays(AgentEnv):
    def __init__(self, play: Play, lossy: Lossy) -> None:
        self.function, self.lossy = play, lossy

    async def play(self, access: AgentAccess) -> float:
        http = httpx.AsyncClient(transport=self.lossy)
        async with Impatient(base_url=access.base_url, api_key=access.api_key, http_client=http) as client:
            return float(await self.function(client))


def text(number: int) -> str:
    """Every third answer calls tools, two at the same time."""
    return f"text {number}" + (f"\n{CALL}\n{CALL}" if number % 3 == 2 else "")


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 10))
def test_whatever_an_agent_does_what_is_trained_is_what_it_was_given(seed: int, steps: int) -> None:
    """The witnesses are the sampler's record and the client's, not the tree."""
    rng = random.Random(seed)

    async def check() -> None:
        async with rollout(*map(text, range(200))) as run:
            lossy = Lossy(rng, run)

            async def play(client: openai.AsyncOpenAI) -> float:
                agent = Agent(rng, client, lossy)
                await agent.ask([agent.question()])
                for _ in range(steps):
                    await agent.step()
                await agent.ask([agent.question()])  # behind all that is still being sampled, which its end would cut
                heard.update(agent.heard)
                return 1.0

            heard: set[tuple[int, ...]] = set()
            trajectory = await run.play_env(Plays(play, lossy))
            prompts = {tuple(said.tolist()): request.prompt.tolist() for said, request in run.pairs}
            assert len(prompts) == len(run.record), "no two answers are the same"
            assert heard <= prompts.keys()
            assert sorted(trained(trajectory)) == sorted(token for said in heard for token in said)
            told = {tuple(turn.action.tolist()): turn for turn in trajectory.transitions}
            assert len(told) == len(trajectory.turns) == len(prompts), "each answer is there once"
            assert {said for said, turn in told.items() if turn.in_loss} == heard
            for said, turn in told.items():
                assert turn.observation.tolist() == prompts[said]
            counts = [turn.metrics["session/undelivered"] for turn in trajectory.turns if turn.metrics]
            assert counts == [len(prompts) - len(heard)]

    asyncio.run(asyncio.wait_for(check(), 60))
