"""Agents against a witness: sub-agents, shortened histories, several answers, calls at the same time, lost connections
and retries in any order, with OpenAI's client. What is trained is what was sampled and delivered, each token once."""

from __future__ import annotations

import asyncio
import random

import httpx
import openai
from agents_support import Play, rollout, trained
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from witness_agents import Agent, Impatient, Lossy, text

from orchestrator.env import AgentEnv
from trireme.core.agents import AgentAccess


class Plays(AgentEnv):
    def __init__(self, play: Play, lossy: Lossy) -> None:
        self.function, self.lossy = play, lossy

    async def play(self, access: AgentAccess) -> float:
        http = httpx.AsyncClient(transport=self.lossy)
        async with Impatient(base_url=access.base_url, api_key=access.api_key, http_client=http) as client:
            return float(await self.function(client))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 10))
def test_whatever_an_agent_does_what_is_trained_is_what_it_was_given(seed: int, steps: int) -> None:
    """The witnesses are the sampler's record and the client's, not the tree."""
    rng = random.Random(seed)

    async def check() -> None:
        async with rollout(*map(text, range(200))) as run:
            lossy = Lossy(rng, run.sampler)

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
