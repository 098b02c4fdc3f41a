"""The service against a witness: an agent with OpenAI's client that does at random what agents do, over connections
that break, while the service is started again and its replicas take new weights. What a session's export trains is what
was sampled and delivered, each token once, and none of its tokens is too old. The witnesses are the sampler's own
record and the client's, not the tree."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import service_support
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service_support import VERSION, ScriptedSampler, Served, served
from session_agents import admin, exported, opened
from witness_agents import Agent, Impatient, Lossy, text

from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity

BOUND = 2
TEXTS = list(map(text, range(400)))


class Policy(ScriptedSampler):
    """Says each text once, whatever service asks, by the newest weights; keeps its own record."""

    said = 0
    version = VERSION
    record: list[tuple[list[int], SampledSequence]]

    async def _say(self, request: SampleRequest, text: Any, told: Any) -> SampledSequence:
        kind = type(self)
        words, kind.said = TEXTS[kind.said], kind.said + 1
        whole = await super()._say(request, words, told)
        spans = (VersionSpan(WeightIdentity(1, kind.version, f"d{kind.version}"), 0, len(whole.tokens)),)
        kind.record.append((request.prompt.tolist(), replace(whole, spans=spans)))
        return kind.record[-1][1]


class Restarted(Lossy):
    """Sends each request to the service that is there now."""

    service: Served

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sampler = self.service.sampler
        self.sampler.hold = self.open
        request.url = request.url.copy_with(port=httpx.URL(self.service.url).port)
        return await super().handle_async_request(request)


def exact(turns: Sequence[Any]) -> list[tuple[list[int], list[int], bool]]:
    """Whole prompts, answers, and if they count."""
    found, before = [], list[int]()
    for turn in turns:
        prompt = before + turn["prompt"] if turn["follows"] else turn["prompt"]
        before = prompt + turn["tokens"]
        found.append((prompt, turn["tokens"], turn["in_loss"]))
    return found


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), steps=st.integers(2, 10), restarts=st.integers(0, 2))
def test_whatever_an_agent_does_and_whatever_happens_to_the_service(seed: int, steps: int, restarts: int) -> None:
    rng = random.Random(seed)
    Policy.said, Policy.version, Policy.record = 0, VERSION, []

    async def check(directory: Path) -> None:
        moments = sorted(rng.sample(range(steps), min(restarts, steps)))
        bounds = [0, *moments, steps]
        session: Any = None
        agent: Any = None
        refused: list[tuple[int, bool]] = []
        for number, (first, last) in enumerate(pairwise(bounds)):
            async with served(*TEXTS, sessions=directory, max_steps_off_policy=BOUND) as service:
                if not number:
                    session = await opened(service)
                    lossy = Restarted(rng, service.sampler)
                    lossy.service = service
                    http = httpx.AsyncClient(transport=lossy)
                    own = Impatient(base_url=session["openai_base_url"], api_key=session["key"], http_client=http)
                    agent = Agent(rng, own, lossy)
                lossy.service = service
                try:
                    if not number:
                        await agent.ask([agent.question()])
                    for _ in range(first, last):
                        Policy.version += rng.random() < 0.3
                        await agent.step()
                    await agent.ask([agent.question()])  # behind all that is still being sampled
                except openai.APIStatusError as error:
                    refused.append((error.status_code, Policy.version > VERSION + BOUND))
                while service.front.registry._running:  # noqa: ASYNC110  their client is gone
                    await asyncio.sleep(0.001)
                if last == steps:
                    assert set(refused) == ({(410, True)} if Policy.version > VERSION + BOUND else set())
                    compare(await exported(service, session), agent)
                    await admin(service, "DELETE", f"/sessions/{session['session']}")
        await agent.client.close()

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_support, "ScriptedSampler", Policy)
        asyncio.run(asyncio.wait_for(check(Path(directory)), 120))


def compare(export: Any, agent: Agent) -> None:
    """The export against the records of the sampler and of the client."""
    sampled = {tuple(answer.tokens.tolist()): prompt for prompt, answer in Policy.record}
    assert len(sampled) == len(Policy.record), "no two answers are the same"
    turns = exact(export["turns"])
    told = {tuple(tokens): (prompt, counts) for prompt, tokens, counts in turns}
    assert len(told) == len(turns), "each answer is there once"
    young = {tuple(tokens) for turn, (_, tokens, _) in zip(export["turns"], turns, strict=True) if in_bound(turn)}
    assert {tokens for tokens, (_, counts) in told.items() if counts} == agent.heard & young
    for tokens, (prompt, _) in told.items():
        assert prompt == sampled[tokens]
    assert export["metrics"]["session/undelivered"] == len(turns) - len(agent.heard)


def in_bound(turn: Any) -> bool:
    """True for an answer all of whose tokens may be trained on; the weights may move on while one is sampled."""
    return all(VERSION <= span["version"] <= VERSION + BOUND for span in turn["version_spans"])
