"""Deterministic mode with agents: one that does what a built-in environment does gives its tokens and rewards bit for
bit, however long its client takes."""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import guessing_agent
import httpx
import numpy as np
import pytest
from config_support import small
from games_support import Engine, Jitter, waves
from orchestrator_fakes import FakeSampler, Run, whole_run

from orchestrator.agents import agent_sessions
from orchestrator.env import EnvContext, load_dataset
from orchestrator.envs.agent import AgentRun
from orchestrator.rollout import RolloutLimits
from service.agents import LoopbackSessions
from service.requests import ServedModels
from trireme.config import Config
from trireme.core.errors import LimitReached
from trireme.core.tokenizer import load_tokenizer
from trireme.core.types import SampledSequence, SampleRequest

MODEL = Path(__file__).parents[3] / "assets" / "guess-base"
TOKENIZER = load_tokenizer(str(MODEL))
MAX_LEN, STEPS, PROBLEMS = 40, 2, 3
BUILT_IN = {"id": "guess", "name": "game", "args": {"max_turns": guessing_agent.MAX_TURNS, "batch_size": PROBLEMS}}
AGENT = {"id": "agent:guessing_agent:play", "name": "game", "args": {"batch_size": PROBLEMS}}


class Player(FakeSampler):
    """Guesses by its seed: mostly a digit; now and then something else, or no end."""

    async def sample(self, request: SampleRequest) -> SampledSequence:
        (span,) = (await super().sample(request)).spans
        text = random.Random(request.params.seed).choice([*"0123456789" * 2, "", "x", "55", "???"])
        tokens = TOKENIZER.encode(text, add_special_tokens=False)
        tokens = [*tokens, TOKENIZER.eos_token_id] if len(tokens) < 3 else tokens
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 8
        spans = (replace(span, end=len(tokens)),)
        return SampledSequence(np.asarray(tokens, np.int32), logprobs, "stop", spans)


class Table(Engine, Player):
    """Its log-probabilities depend on all requests that it works on at the same time."""


def config(env: dict[str, Any], limit_s: float = 30.0) -> Config:
    return small(
        max_steps=STEPS,
        deterministic=True,
        model={"name": str(MODEL), "max_seq_len": MAX_LEN},
        renderer={"name": "guessing_agent:Bare"},
        orchestrator={
            **{"batch_size": PROBLEMS, "group_size": 2, "max_steps_off_policy": 0, "retries": 0},
            **{"generation_timeout_s": limit_s, "remove_constant_reward_groups": True},
        },
        env=env,
        timeouts={"batch_s": 60, "update_s": 60},
    )


async def played(env: dict[str, Any], jitter: int = 0, **options: Any) -> Run:
    """A whole run, after which its port is closed."""
    guessing_agent.shared.cache_clear()  # its connections are of the event loop of another run
    run_config = config(env, **options)
    context = EnvContext(TOKENIZER, run_config.seed, group_size=2, rendering=run_config.renderer)
    models = ServedModels(("policy",), MAX_LEN, len(TOKENIZER))
    limits = RolloutLimits(len(TOKENIZER), MAX_LEN, decode=TOKENIZER.decode)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(agent_sessions(lambda: LoopbackSessions(run_config, models)))
        dataset = load_dataset(run_config.env[0], context)
        return await whole_run(Run(run_config, dataset, limits=limits, sampler=Table(Jitter(jitter))))


def outcome(run: Run) -> list[Any]:
    """Tokens, log-probabilities, advantages and rewards of each batch, and which requests were sampled together."""
    batches = [
        (m.batch.tokens.tolist(), {name: column.tolist() for name, column in m.batch.columns.items()})
        for batch in run.batches
        for m in batch
    ]
    requests = [(r.request_id, r.prompt.tolist(), r.params, r.route_key, r.began) for r in run.sampler.requests]
    rewards = [{name: row[name] for name in row if name.startswith(("reward", "ledger"))} for row in run.rows]
    return [batches, [released.trained for released in run.released], waves(run), sorted(requests, key=str), rewards]


def run(env: dict[str, Any], **options: Any) -> Run:
    return asyncio.run(asyncio.wait_for(played(env, **options), 90))


def slow_transport(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Makes the client take some milliseconds for some of its requests."""
    rng, send = random.Random(seed), httpx.AsyncHTTPTransport.handle_async_request

    async def late(self: Any, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.01, 0.03]))
        return await send(self, request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", late)


def test_an_agent_gives_the_tokens_and_rewards_of_the_environment_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    built_in = run(BUILT_IN)
    expected = outcome(built_in)
    assert any(row["ledger/filtered"] for row in built_in.rows), "a group is replaced by another one"
    assert len({turn for wave in waves(built_in) for turn in [request[-1] for request in wave]}) == 4
    slow_transport(monkeypatch, seed=1)
    agent = run(AGENT, jitter=1)
    for actual, reference in zip(outcome(agent), expected, strict=True):
        assert actual == reference
    assert agent.rows[0]["env/all/session/undelivered"] == 0


def test_an_agent_that_is_silent_is_named_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(access: AgentRun) -> float:
        await asyncio.Event().wait()
        return 0.0

    monkeypatch.setattr(guessing_agent, "play", silent)
    message = r"environment game, problem 0\.0\.\d, of agent:guessing_agent:play: took longer than orchestrator\.gener"
    with pytest.raises(LimitReached, match=message):
        run(AGENT, limit_s=0.2)
