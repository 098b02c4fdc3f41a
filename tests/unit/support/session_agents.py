"""Agents of sessions over HTTP: OpenAI's client, and the harness that opens and exports sessions."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from service_support import ADMIN, Served

QUESTION: Any = {"role": "user", "content": "What is 2 + 2?"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def admin(service: Served, method: str, path: str, **body: Any) -> Any:
    """Calls a route with the admin key. Returns the body of its answer."""
    answer = await service.client.request(method, path, headers=bearer(ADMIN), json=body or None)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def opened(service: Served) -> Any:
    return await admin(service, "POST", "/sessions")


async def exported(service: Served, session: Any) -> Any:
    await admin(service, "POST", f"/sessions/{session['session']}/end")
    return await admin(service, "GET", f"/sessions/{session['session']}/export")


def of(session: Any, **options: Any) -> openai.AsyncOpenAI:
    """An agent: it is told a base URL and a key."""
    return openai.AsyncOpenAI(
        base_url=session["openai_base_url"], api_key=session["key"], **{"max_retries": 0, **options}
    )


@asynccontextmanager
async def session_of(service: Served) -> AsyncIterator[tuple[Any, openai.AsyncOpenAI]]:
    """Opens a session, and an agent that plays it."""
    session = await opened(service)
    async with of(session) as agent:
        yield session, agent


async def ask(agent: openai.AsyncOpenAI, *messages: Any, **body: Any) -> Any:
    return await agent.chat.completions.create(model="policy", messages=list(messages), **body)


async def text_of(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


def sampled(service: Served) -> list[int]:
    """The tokens of all answers, as the sampler said them."""
    tokens: list[int] = []
    for request, text in zip(service.sampler.requests, service.sampler.texts * 99, strict=False):
        assert isinstance(text, str)
        end = next(iter(request.params.stop_token_ids), service.gateway.turns.tokenizer.eos_token_id)
        tokens += [*service.gateway.turns.tokenizer.encode(text, add_special_tokens=False), end]
    return tokens


def trained(export: Any) -> list[int]:
    return [token for turn in export["turns"] if turn["in_loss"] for token in turn["tokens"]]


async def refused(agent: openai.AsyncOpenAI, *messages: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as refusal:
        await ask(agent, *(messages or (QUESTION,)))
    return refusal.value
