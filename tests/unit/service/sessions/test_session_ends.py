"""What sessions refuse over HTTP, how they end, and what is left after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from service_support import ADMIN, VERSION, Served, served
from session_agents import QUESTION, admin, ask, bearer, exported, of, opened, refused

from service import front as fronts
from service.sessions.turns import SessionClosed
from trireme.core.errors import ProvenanceError, RoomFailed, StorageFailed


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


async def test_a_turn_that_runs_when_the_session_ends_is_gone_too() -> None:
    async with served("one") as service:
        session = await opened(service)
        service.sampler.hold = asyncio.Event()
        async with of(session) as agent:
            call = asyncio.ensure_future(refused(agent))
            while not service.sampler.requests:  # noqa: ASYNC110  the call makes it true
                await asyncio.sleep(0.001)
            export = await exported(service, session)
            assert (await call).status_code == 410
        assert export["turns"] == []
        assert service.sampler.cancelled == 1


async def test_a_turn_that_would_be_too_old_is_refused() -> None:
    async with served("one", max_steps_off_policy=2) as service:
        session = await opened(service)
        assert session["floor"] == VERSION
        async with of(session) as agent:
            service.sampler.version = VERSION + 1
            await ask(agent, QUESTION)
            service.sampler.version = VERSION + 3
            error = await refused(agent)
            assert error.status_code == 410
            assert "stale" in error.message
        assert len(service.sampler.requests) == 2, "it was refused by the version that answered"
        (turn,) = (await exported(service, session))["turns"]
        assert turn["in_loss"], "what it has counts"


async def test_only_so_many_are_open() -> None:
    async with served("one", most=2) as service:
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
        found = await refused(agent)
        assert (found.status_code, found.code) == (status, code)
        assert ("retry-after" in found.response.headers) == (status == 503)


async def test_after_a_restart_the_same_key_continues_and_without_a_journal_it_is_closed(tmp_path: Path) -> None:
    async with served("one", sessions=tmp_path / "sessions") as service:
        session = await opened(service)
        async with of(session) as agent:
            first = (await ask(agent, QUESTION)).choices[0].message
    more = {"role": "user", "content": "Sure?"}

    async def later(directory: Path, check: Callable[[Served, openai.AsyncOpenAI], Awaitable[None]]) -> None:
        async with served("two", sessions=directory) as again:
            url = f"{again.url}/sessions/{session['session']}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=session["key"], max_retries=0) as agent:
                await check(again, agent)

    async def continues(again: Served, agent: openai.AsyncOpenAI) -> None:
        await ask(agent, QUESTION, first, more)
        export = await exported(again, session)
        assert [turn["follows"] for turn in export["turns"]] == [False, True]
        before = export["turns"][0]["prompt"] + export["turns"][0]["tokens"]
        assert again.sampler.requests[0].prompt.tolist()[: len(before)] == before

    async def closed(again: Served, agent: openai.AsyncOpenAI) -> None:
        assert (await refused(agent, QUESTION, first, more)).status_code == 410
        assert again.sampler.requests == []

    await later(tmp_path / "sessions", continues)
    await later(tmp_path / "empty", closed)


def strange_bodies() -> Sequence[tuple[Any, str]]:
    said = {"role": "assistant", "content": "4", "token_ids": [1, 2]}
    return [
        ({"messages": [QUESTION, said, QUESTION]}, "token_ids in a message of a session"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "4"}]}, "the last message has the role assistant"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "context length"),
        ({"messages": [QUESTION], "model": "other"}, "is not loaded"),
    ]


@pytest.mark.parametrize(("body", "why"), strange_bodies())
async def test_what_no_session_answers(body: Any, why: str) -> None:
    async with served("one") as service:
        session = await opened(service)
        headers = bearer(session["key"])
        path = f"/sessions/{session['session']}/v1/chat/completions"
        answer = await service.client.post(path, json={"model": "policy", **body}, headers=headers)
        assert answer.status_code in (400, 404), answer.text
        assert why in answer.json()["error"]["message"]
        assert not service.sampler.requests


async def test_sampling_of_its_own_is_overruled_and_counted() -> None:
    async with served("one") as service:
        session = await opened(service)
        async with of(session) as agent:
            await ask(agent, QUESTION, temperature=0.2)
            await ask(agent, QUESTION, temperature=1.0, max_tokens=7, seed=4)
        assert [request.params.temperature for request in service.sampler.requests] == [1.0, 1.0]
        assert [request.params.max_tokens for request in service.sampler.requests] == [500, 7]
        assert (await exported(service, session))["metrics"]["session/overruled"] == 1


async def test_sessions_are_swept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an owner forgets one in the moment in which it is ended, or a sweep fails."""
    monkeypatch.setattr(fronts, "SWEEP_S", 0.001)
    async with served("one") as service:
        registry, looks = service.front.registry, 0

        async def sweep() -> list[str]:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise SessionClosed("another", "it was forgotten")
            return ["gone"]

        monkeypatch.setattr(registry, "sweep", sweep)
        sweeper = asyncio.create_task(service.front.keep_swept())
        while looks < 3 and not sweeper.done():  # noqa: ASYNC110  the task makes it true
            await asyncio.sleep(0.001)
        assert not sweeper.done()
        sweeper.cancel()
