"""How the rollouts of agents end: with the last answer, an error, a limit, and whatever the client does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from agents_support import KEY, Plays, ask, rollout, trained, user

from orchestrator.env import AgentEnv
from orchestrator.rollout import AnswerTimeout
from trireme.core.agents import AgentAccess
from trireme.core.errors import RoomFailed


class QuickAgent(AgentEnv):
    """Ends with the last byte of its answer: it has no client between the socket and itself."""

    async def play(self, access: AgentAccess) -> Any:
        address, path = access.base_url.removeprefix("http://").split("/", 1)
        host, port = address.split(":")
        body = json.dumps({"model": access.model, "messages": [user("q")]})
        head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nx-api-key: {access.api_key}\r\n"
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        answered = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(answered.split(b"content-length:")[1].split(b"\r\n")[0]))
        writer.close()
        return 1.0


async def test_the_last_answer_counts_however_quickly_the_agent_ends() -> None:
    async with rollout("one") as run:
        trajectory = await run.play_env(QuickAgent())
        assert trained(trajectory) == run.sampled
        assert trajectory.turns[-1].metrics["session/undelivered"] == 0


async def test_the_last_answer_says_how_the_rollout_ended_in_whatever_branch_it_is() -> None:
    async def play(client: openai.AsyncOpenAI) -> float:
        first = await ask(client, user("q"))
        helper = await ask(client, user("help"))
        await ask(client, user("q"), first, user(helper["content"]))
        return 1.0

    async with rollout("one", "two...", "three") as run:
        trajectory = await run.play(play)
        assert [turn.stop_reason for turn in trajectory.turns] == ["stop", "stop", "length"], (
            "the helper's branch is last"
        )
        assert trajectory.stop_reason == "stop"
        assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0, 0.0]
        assert "session/roots" in trajectory.turns[1].metrics


async def test_an_agent_cannot_reward_itself_with_the_key_that_it_has() -> None:
    """Nor does it open, export or forget sessions: the port has no such routes, whatever the key."""
    async with rollout("one") as run:
        env = Plays(lambda client: cheat(client))

        async def cheat(client: openai.AsyncOpenAI) -> float:
            await ask(client, user("q"))
            base, key = env.access.anthropic_base_url, {"x-api-key": env.access.api_key}
            async with httpx.AsyncClient() as http:
                given = await http.post(f"{base}/reward", json={"value": 1000}, headers=key)
                assert given.status_code == 403
                assert "POST /sessions/{session}/reward is not open to a key of the role session" in given.text
                for method, url in (
                    *(("GET", f"{base}/export"), ("DELETE", base)),
                    *(("POST", base.rpartition("/")[0]), ("GET", base.rpartition("/")[0])),
                ):
                    assert (await http.request(method, url, headers=key)).status_code == 403
                    assert (await http.request(method, url)).status_code == 401
                shown = await http.get(base.rpartition("/sessions")[0] + "/openapi.json", headers=key)
                assert not [path for path in shown.json()["paths"] if path.endswith(("/reward", "/export"))]
            return 0.0

        trajectory = await run.play_env(env)
        assert trajectory.reward == 0
        assert not [name for turn in trajectory.turns for name in turn.metrics if "reward" in name]


async def test_an_agent_is_told_why_it_gets_no_answer_and_may_ask_again() -> None:
    late = AnswerTimeout(f"{KEY}: an answer took longer than 9 s")

    async def play(client: openai.AsyncOpenAI) -> float:
        with pytest.raises(openai.InternalServerError, match="an answer took longer than 9 s") as told:
            await ask(client, user("q"))
        assert told.value.status_code == 503
        await ask(client, user("q"))
        return 1.0

    async def fails(client: openai.AsyncOpenAI) -> float:
        await play(client)
        raise ValueError("a bug of the agent")

    async def gives_up(client: openai.AsyncOpenAI) -> float:
        await ask(client, user("q"))
        return 1.0

    async with rollout(late, "one") as run:
        assert trained(await run.play(play)) == run.sampled
        with pytest.raises(ValueError, match="a bug of the agent"):
            await run.play(fails)
        with pytest.raises(AnswerTimeout):
            await run.play(gives_up)


async def test_the_error_of_a_room_is_raised_although_the_deadline_came_before_the_agent_gave_up() -> None:
    async def play(client: openai.AsyncOpenAI) -> float:
        with pytest.raises(openai.InternalServerError):
            await ask(client, user("q"))
        await asyncio.Event().wait()
        return 1.0

    async with rollout(RoomFailed("no replica is left")) as run:
        with pytest.raises(RoomFailed, match="no replica is left"):
            async with asyncio.timeout(0.3):
                await run.play(play)


class AskingWith(Plays):
    """Asks, and then once more with the key of a session that another process had at the same port."""

    def __init__(self, lost: AgentAccess | None) -> None:
        super().__init__(self.both)
        self.lost = lost
        self.answers: list[httpx.Response] = []

    async def both(self, client: openai.AsyncOpenAI) -> float:
        await ask(client, user("q"))
        if self.lost:
            here = httpx.URL(self.access.base_url)
            body = {"model": "policy", "messages": [user("q")]}
            headers = {"Authorization": f"Bearer {self.lost.api_key}"}
            for base in (httpx.URL(self.lost.base_url).copy_with(port=here.port), here.copy_with(path="/v1")):
                async with httpx.AsyncClient() as other:
                    self.answers.append(await other.post(f"{base}/chat/completions", json=body, headers=headers))
        return 1.0


async def test_an_agent_whose_orchestrator_was_lost_gets_no_answer_of_the_next_one() -> None:
    """Its program may live longer, and find another orchestrator at the same port: it must not begin a session anew."""
    before = AskingWith(None)
    async with rollout("one") as run:
        await run.play_env(before)
    after = AskingWith(before.access)
    async with rollout("one") as run:
        trajectory = await run.play_env(after)
        assert (trajectory.turns[-1].metrics["session/roots"], len(run.record)) == (1, 1)
    said = [(answer.status_code, answer.json()["error"]["code"]) for answer in after.answers]
    assert said == [(401, "invalid_api_key")] * 2
