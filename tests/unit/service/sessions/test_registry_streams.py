"""Streams in sessions: pieces come as they are sampled, the turn is stored before the last of them, and a stream
without its end counts for nothing."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from service_support import VERSION, Served, served
from session_agents import QUESTION, ask, bearer, exported, opened, refused, sampled, session_of, text_of, trained
from waiting import wait_for_tasks

from service.sessions.records import TurnAnswered
from service.store import Row, Store
from trireme.core.errors import StorageFailed

TEXT = "Let me think about it: the number was 4."
BODIES: dict[str, Any] = {
    "chat/completions": {"messages": [QUESTION]},
    "completions": {"prompt": "a"},
    "responses": {"input": "a"},
    "messages": {"messages": [QUESTION], "max_tokens": 300},
}


def turns_of(service: Served, session: Any) -> int:
    return service.gateway.registry.book.sessions[session["session"]].tree.counts.turns


async def test_pieces_come_before_the_turn_is_stored_and_its_end_comes_after() -> None:
    async with served(TEXT) as service, session_of(service) as (session, agent):
        service.sampler.hold_within = asyncio.Event()
        stream = await ask(agent, QUESTION, stream=True)
        first = await anext(stream)
        assert (first.choices[0].delta.role, first.choices[0].finish_reason) == ("assistant", None)
        assert turns_of(service, session) == 0
        service.sampler.hold_within.set()
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            assert (turns_of(service, session) == 1) >= (chunk.choices[0].finish_reason is not None)
        assert text == TEXT
        assert trained(await exported(service, session)) == sampled(service)


async def test_a_client_that_leaves_a_stream_finds_the_whole_answer_by_its_retry() -> None:
    async with served(TEXT, "another one") as service, session_of(service) as (session, agent):
        service.sampler.hold_within = asyncio.Event()
        stream = await ask(agent, QUESTION, stream=True)
        await anext(stream)
        await stream.close()
        (running,) = service.gateway.registry.book.sessions[session["session"]].running
        await wait_for_tasks(lambda: not running.callers, "its client to leave")
        retry: Any = {"extra_headers": {"x-stainless-retry-count": "1"}, "stream": True}
        joined = asyncio.create_task(ask(agent, QUESTION, **retry))
        await wait_for_tasks(lambda: running.callers, "the retry")
        service.sampler.hold_within.set()
        assert await text_of(await joined) == TEXT, "it joins the turn that is being sampled"
        assert await text_of(await ask(agent, QUESTION, **retry)) == TEXT, "it is stored"
        assert (len(service.sampler.requests), service.sampler.cancelled) == (1, 0)
        assert trained(await exported(service, session)) == sampled(service)


async def test_an_answer_whose_client_left_its_stream_is_stored_and_not_trained() -> None:
    async with served(TEXT) as service, session_of(service) as (session, agent):
        service.sampler.hold_within = asyncio.Event()
        stream = await ask(agent, QUESTION, stream=True)
        await anext(stream)
        await stream.close()
        (running,) = service.gateway.registry.book.sessions[session["session"]].running
        await wait_for_tasks(lambda: not running.callers, "its client to leave")
        service.sampler.hold_within.set()
        await wait_for_tasks(lambda: turns_of(service, session) == 1, "the turn")
        export = await exported(service, session)
        assert [turn["in_loss"] for turn in export["turns"]] == [False]
        assert export["metrics"]["session/undelivered"] == 1


@pytest.mark.parametrize("path", BODIES)
async def test_a_turn_that_is_not_stored_ends_its_stream(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(TEXT) as service:
        session = await opened(service)
        append = Store.append

        def full(store: Store, row: Row) -> None:
            if row.head["kind"] == TurnAnswered.__name__:
                raise StorageFailed("no space is left")
            append(store, row)

        monkeypatch.setattr(Store, "append", full)
        headers = {**bearer(session["key"]), "anthropic-version": "2023-06-01"}
        body = {"model": "policy", "stream": True, **BODIES[path]}
        async with httpx.AsyncClient(base_url=service.url, headers=headers) as client:
            answer = await client.post(f"/sessions/{session['session']}/v1/{path}", json=body)
        events = [line for line in answer.text.split("\n\n") if line]
        assert len(events) > 2, "pieces were sent before"
        assert "no space is left" in events[-1]
        assert not any("[DONE]" in event or "completed" in event or "message_stop" in event for event in events)
        assert turns_of(service, session) == 0


async def test_no_piece_is_sent_of_an_answer_beyond_the_bound() -> None:
    async with served(TEXT, max_steps_off_policy=1) as service, session_of(service) as (session, agent):
        await ask(agent, QUESTION, stream=True)
        service.sampler.version = VERSION + 2
        with pytest.raises(openai.APIStatusError, match="stale") as closed:
            await ask(agent, QUESTION, stream=True)
        assert closed.value.status_code == 410
        assert (await refused(agent)).status_code == 410
        assert len((await exported(service, session))["turns"]) == 1
