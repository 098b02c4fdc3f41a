"""Sessions over HTTP, as agents with OpenAI's and Anthropic's own clients see them, and those who opened them."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from renderer_support import CALCULATOR
from service_support import ADMIN, CALLS, CLIENT, TOOL, VERSION, Served, served
from session_agents import QUESTION, admin, ask, bearer, exported, of, opened, refused, sampled, session_of, trained
from waiting import wait_for_tasks

from service import gateway as gateways
from service.sessions.checks import SessionClosed
from trireme.core.errors import ProvenanceError, RoomFailed, StorageFailed


async def test_an_agent_with_a_tool_is_one_growing_sequence() -> None:
    async with served(CALLS, "It is 4.") as service, session_of(service) as (session, agent):
        first = (await ask(agent, QUESTION, tools=[TOOL])).choices[0]
        (call,) = first.message.tool_calls
        assert json.loads(call.function.arguments) == {"expression": "2 + 2"}
        reply = first.message.model_dump(exclude_none=True)
        tool_result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        answer = await ask(agent, QUESTION, reply, tool_result, tools=[TOOL])
        assert answer.choices[0].message.content == "It is 4."
        assert (answer.usage.version, answer.usage.oldest_version) == (VERSION + 1, VERSION)
        export = await exported(service, session)
        turns = export["turns"]
        assert [turn["follows"] for turn in turns] == [False, True]
        assert trained(export) == sampled(service)
        whole = turns[0]["prompt"] + turns[0]["tokens"] + turns[1]["prompt"]
        assert service.sampler.requests[1].prompt.tolist() == whole
        assert (export["metrics"]["session/roots"], export["metrics"]["session/retokenised"]) == (1, 0)
        spans = turns[0]["version_spans"]
        assert [(span["version"], span["digest"]) for span in spans] == [(VERSION, "d0"), (VERSION + 1, "d1")]


async def test_anthropics_client() -> None:
    async with served(CALLS, "It is 4.") as service:
        session = await opened(service)
        tool: Any = {"name": CALCULATOR["name"], "input_schema": CALCULATOR["parameters"]}
        options: Any = {"model": "policy", "max_tokens": 400, "tools": [tool]}
        agent = anthropic.AsyncAnthropic(base_url=session["anthropic_base_url"], api_key=session["key"], max_retries=0)
        async with agent:
            first = await agent.messages.create(messages=[QUESTION], **options)
            used = first.content[-1]
            assert used.type == "tool_use"
            result: Any = {"type": "tool_result", "tool_use_id": used.id, "content": "4"}
            reply: Any = {"role": "assistant", "content": first.content}
            messages: Any = [QUESTION, reply, {"role": "user", "content": [result]}]
            async with agent.messages.stream(messages=messages, **options) as stream:
                assert await stream.get_final_text() == "It is 4."
        export = await exported(service, session)
        assert [turn["follows"] for turn in export["turns"]] == [False, True]
        assert trained(export) == sampled(service)


async def test_the_dialect_of_responses() -> None:
    async with served("It is 4.", "Sure.") as service, session_of(service) as (session, agent):
        first = await agent.responses.create(model="policy", input=[QUESTION])
        conversation: Any = [QUESTION, *first.output, {"role": "user", "content": "Sure?"}]
        second = await agent.responses.create(model="policy", input=conversation)
        assert second.output_text == "Sure."
        export = await exported(service, session)
        assert [turn["follows"] for turn in export["turns"]] == [False, True]
        assert trained(export) == sampled(service)


async def test_a_key_opens_its_own_session_alone() -> None:
    async with served("4") as service:
        one, other = await opened(service), await opened(service)
        path = f"/sessions/{one['session']}"
        body = {"model": "policy", "messages": [QUESTION]}
        for key, status in ((one["key"], 200), (ADMIN, 200), (other["key"], 403), (CLIENT, 403), ("x" * 40, 401)):
            headers = bearer(key)
            for method, route in (("POST", "/v1/chat/completions"), ("GET", ""), ("GET", "/v1/models")):
                answer = await service.client.request(method, path + route, headers=headers, json=body)
                assert answer.status_code == status, (key, route)
        for method, route in (("GET", f"{path}/export"), ("DELETE", path), ("POST", "/sessions"), ("GET", "/sessions")):
            for key in (one["key"], CLIENT):
                answer = await service.client.request(method, route, headers=bearer(key))
                assert answer.status_code == 403, (key, route)
        forged = one["key"].replace(one["session"], other["session"])
        answer = await service.client.get("/sessions/" + other["session"], headers=bearer(forged))
        assert answer.status_code == 401


async def test_the_key_alone_leads_to_the_session() -> None:
    async with served("4") as service:
        session = await opened(service)
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=session["key"], max_retries=0) as agent:
            await ask(agent, QUESTION)
            await agent.completions.create(model="policy", prompt="2 + 2 =", max_tokens=50)
        assert trained(await exported(service, session)) == sampled(service)


async def test_an_answer_that_could_not_be_delivered_is_masked_and_counted() -> None:
    async with served("one", "two") as service, session_of(service) as (session, agent):
        service.sampler.hold = asyncio.Event()
        async with of(session, timeout=0.2) as impatient:
            with pytest.raises(openai.APITimeoutError):
                await ask(impatient, QUESTION)
        service.sampler.hold.set()
        await ask(agent, QUESTION)
        sessions = service.gateway.registry.book.sessions.values()
        await wait_for_tasks(lambda: not any(open_session.running for open_session in sessions), "the first answer")
        export = await exported(service, session)
        assert [turn["in_loss"] for turn in export["turns"]].count(True) == 1
        assert export["metrics"]["session/undelivered"] == 1
        assert len(export["turns"]) == 2


async def test_rewards_are_those_of_whoever_opened_the_session_alone() -> None:
    async with served("one", "two") as service, session_of(service) as (session, agent):
        path = f"/sessions/{session['session']}/reward"
        first = await ask(agent, QUESTION)
        await ask(agent, QUESTION, first.choices[0].message, {"role": "user", "content": "Sure?"})
        (answer,) = first.usage.answers
        for key in (session["key"], CLIENT):
            response = await service.client.post(path, json={"value": 1000.0}, headers=bearer(key))
            assert response.status_code == 403
            assert "POST /sessions/{session}/reward is not open to a key of the role" in response.text
        for value in (0.25, 0.5):  # the last word counts
            await admin(service, "POST", path, value=value, answer=answer)
        for body in ({"value": 1.0, "answer": 0}, {"value": 1.0, "answer": 77}, {"value": "much"}, {}):
            assert (await service.client.post(path, json=body, headers=bearer(ADMIN))).status_code == 400
        await admin(service, "POST", path, value=2.0, metrics={"solved": 1.0})
        export = await exported(service, session)
        assert [turn["reward"] for turn in export["turns"]] == [0.5, 2.0]
        assert export["reward"] == 2.5
        assert export["metrics"]["solved"] == 1


async def test_a_session_that_ended_or_was_forgotten_is_gone_and_no_client_tries_again() -> None:
    async with served("one") as service:
        session = await opened(service)
        async with of(session, max_retries=2) as agent:
            await ask(agent, QUESTION)
            await admin(service, "POST", f"/sessions/{session['session']}/end", reason="the harness has enough")
            error = await refused(agent)
            assert (error.status_code, error.code) == (410, "session_closed")
            assert "the harness has enough" in error.message
            assert (await admin(service, "GET", "/sessions"))["sessions"][0]["refused"] == 1, "no retry"
            await admin(service, "DELETE", f"/sessions/{session['session']}")
            assert (await refused(agent)).status_code == 410
        assert len(service.sampler.requests) == 1


async def test_only_so_many_are_open() -> None:
    async with served("one", limit=2) as service:
        first, _ = await opened(service), await opened(service)
        answer = await service.client.post("/sessions", headers=bearer(ADMIN))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "sessions_full")
        assert int(answer.headers["retry-after"]) > 0
        await admin(service, "POST", f"/sessions/{first['session']}/end")
        await opened(service)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RoomFailed("no replica is left"), 503, "replicas_failed"),
        (StorageFailed("no space"), 503, "storage_failed"),
        (ProvenanceError("version 3, behind 20"), 410, "session_closed"),
    ],
)
async def test_errors_say_whether_to_try_again(error: Exception, status: int, code: str) -> None:
    async with served(error) as service, of(await opened(service)) as agent:
        refusal = await refused(agent)
        assert (refusal.status_code, refusal.code) == (status, code)
        assert ("retry-after" in refusal.response.headers) == (status == 503)


async def test_after_a_restart_the_same_key_continues_and_without_a_journal_it_is_closed(tmp_path: Path) -> None:
    async with served("one", sessions=tmp_path / "sessions") as service, session_of(service) as (session, agent):
        first = (await ask(agent, QUESTION)).choices[0].message
    question = {"role": "user", "content": "Sure?"}

    async def later(directory: Path, check: Callable[[Served, openai.AsyncOpenAI], Awaitable[None]]) -> None:
        async with served("two", sessions=directory) as again:
            url = f"{again.url}/sessions/{session['session']}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=session["key"], max_retries=0) as agent:
                await check(again, agent)

    async def continues(again: Served, agent: openai.AsyncOpenAI) -> None:
        await ask(agent, QUESTION, first, question)
        export = await exported(again, session)
        assert [turn["follows"] for turn in export["turns"]] == [False, True]
        before = export["turns"][0]["prompt"] + export["turns"][0]["tokens"]
        assert again.sampler.requests[0].prompt.tolist()[: len(before)] == before

    async def closed(again: Served, agent: openai.AsyncOpenAI) -> None:
        assert (await refused(agent, QUESTION, first, question)).status_code == 410
        assert again.sampler.requests == []

    await later(tmp_path / "sessions", continues)
    await later(tmp_path / "empty", closed)


def strange_bodies() -> Sequence[tuple[Any, str]]:
    reply = {"role": "assistant", "content": "4", "token_ids": [1, 2]}
    return [
        ({"messages": [QUESTION, reply, QUESTION]}, "token_ids in a message of a session"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "4"}]}, "the last message has the role assistant"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "context length"),
        ({"messages": [QUESTION], "model": "other"}, "is not loaded"),
    ]


@pytest.mark.parametrize(("body", "reason"), strange_bodies())
async def test_what_no_session_answers(body: Any, reason: str) -> None:
    async with served("one") as service:
        session = await opened(service)
        headers = bearer(session["key"])
        path = f"/sessions/{session['session']}/v1/chat/completions"
        answer = await service.client.post(path, json={"model": "policy", **body}, headers=headers)
        assert answer.status_code in (400, 404), answer.text
        assert reason in answer.json()["error"]["message"]
        assert not service.sampler.requests


async def test_sessions_are_swept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an owner forgets one in the moment in which it is ended, or a sweep fails."""
    monkeypatch.setattr(gateways, "SWEEP_S", 0.001)
    async with served("one") as service:
        registry, looks = service.gateway.registry, 0

        async def sweep() -> list[str]:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise SessionClosed("another", "it was forgotten")
            return ["gone"]

        monkeypatch.setattr(registry, "sweep", sweep)
        sweeper = asyncio.create_task(service.gateway.keep_swept())
        await wait_for_tasks(lambda: looks >= 3 or sweeper.done(), "three sweeps")
        assert not sweeper.done()
        sweeper.cancel()
