"""Environments behind a URL, against the server of examples/envs, and against servers that fail."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
import server
from aiohttp import web
from chat_support import Policy, encoded_answer, rollout
from renderer_support import QWEN3, bpe
from web_support import serving

from orchestrator.env import EnvContext, Trajectory, load_dataset
from orchestrator.envs import http
from orchestrator.message_env import RenderedEnv
from trireme.config.schema import EnvConfig, RendererConfig
from trireme.core.errors import BadInput

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Watched(server.Addition):
    closed: ClassVar[asyncio.Event]
    counts: ClassVar[Counter[str]] = Counter()

    async def reset(self, task: dict[str, Any]) -> Any:
        self.counts["reset"] += 1
        return await super().reset(task)

    async def step(self, message: dict[str, Any], fault: str | None) -> Any:
        self.counts["step"] += 1
        return await super().step(message, fault)

    async def close(self) -> None:
        self.counts["close"] += 1
        self.closed.set()


@asynccontextmanager
async def sessions(
    kind: Any = Watched, tool_s: float = 0.0, lease_s: float = 60.0, middlewares: Sequence[Any] = ()
) -> AsyncIterator[tuple[str, Counter[str]]]:
    """The example's server; `middlewares` stand before it."""
    Watched.counts, Watched.closed = Counter(), asyncio.Event()
    app = server.Sessions(lambda: kind(tool_s), lease_s).app()
    app.middlewares.extend(middlewares)
    async with serving(app) as url:
        yield url, Watched.counts


def context(split: Any = "train") -> EnvContext:
    return EnvContext(bpe(QWEN3), 0, 2, split, RendererConfig(strip_thinking_from_history=False))


def maker(url: str, task: int = 0, split: Any = "train", **args: Any) -> Any:
    dataset = load_dataset(EnvConfig(id=url, args=args), context(split))
    return dataset.get_batch(0)[task].make


async def play(env: Any, *texts: str) -> tuple[Trajectory, list[str]]:
    """Plays an episode, closes it, and returns it with all prompts."""
    renderer = context().renderer
    policy = Policy([encoded_answer(text, renderer, seed) for seed, text in enumerate(texts)])
    rendered = RenderedEnv(env, renderer)
    try:
        trajectory = await rollout(rendered, policy)
    finally:
        await rendered.close()
    return trajectory, [bpe().decode(request.prompt) for request in policy.requests]


def call(a: int, b: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


async def test_an_episode_with_a_tool_of_the_server() -> None:
    async with sessions() as (url, counts):
        make = maker(url)
        env = make()
        trajectory, prompts = await play(env, call(4, 38), "I do not know.")
        assert "Adds two whole numbers." in prompts[0]
        assert "What is " in prompts[0]
        assert "<tool_response>\n42\n</tool_response>" in prompts[1]
        assert trajectory.reward == 0
        assert trajectory.transitions[-1].metrics == {"parse_error": 0.0, "success": 0.0}
        a, b = prompts[0].partition("What is ")[2].partition("?")[0].split(" + ")
        right, _ = await play(make(), str(int(a) + int(b)))
        assert right.reward == 1, "the same task again"
        assert counts == {"reset": 2, "step": 3, "close": 2}


async def test_what_cannot_be_read_is_told_to_the_server() -> None:
    async with sessions() as (url, _):
        trajectory, _ = await play(maker(url)(), "<tool_call>\nno json\n</tool_call>")
        assert trajectory.reward == 0
        assert trajectory.transitions[0].metrics == {"parse_error": 1.0, "success": 0.0}


def test_tasks_depend_on_seed_split_and_number_alone_and_spread_over_servers() -> None:
    def tasks(**options: Any) -> list[Mapping[str, Any]]:
        dataset = load_dataset(EnvConfig(id="http://a:1/", args={"options": {"level": 3}}), context(**options))
        return [group.make.args[1] for group in dataset.get_batch(2)]  # type: ignore[attr-defined]

    assert tasks() == tasks()
    assert tasks()[0]["task"] == 32
    assert tasks()[0]["level"] == 3
    assert {task["seed"] for task in tasks()}.isdisjoint(task["seed"] for task in tasks(split="eval"))


async def test_a_lost_answer_is_asked_for_again_and_the_turn_is_played_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is busy at first. Then each request is worked on, and its connection is cut before the answer."""
    monkeypatch.setattr(http, "PAUSES_S", (0.01,))
    tries: Counter[str] = Counter()

    @web.middleware
    async def cut(request: web.Request, handler: Handler) -> web.StreamResponse:
        tries[request.path] += 1
        if tries[request.path] < 4:
            raise web.HTTPServiceUnavailable
        answer = await handler(request)
        if tries[request.path] == 4:
            assert request.transport
            request.transport.abort()
        return answer

    async with sessions(middlewares=[cut]) as (url, counts):
        trajectory, _ = await play(maker(url)(), "7")
        assert len(trajectory.transitions) == 1
        assert counts == {"reset": 1, "step": 1, "close": 1}
    assert set(tries.values()) == {5}


async def test_a_turn_that_takes_too_long_names_the_url_and_the_session_is_ended() -> None:
    async with sessions(tool_s=60) as (url, counts):
        with pytest.raises(http.EnvServerDown, match=rf"POST {url}/sessions/\w+/step .*within 0.3 s .*env.args.step_s"):
            await play(maker(url, step_s=0.3)(), call(1, 2))
        assert counts["close"] == 1


async def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(http.EnvServerDown, match=r"http://127.0.0.1:9/sessions/\w+/reset .*ClientConnectorError"):
        await maker("http://127.0.0.1:9", reset_s=0.1)().initial_messages()


async def test_a_session_that_is_gone_fails_the_rollout_with_what_the_server_says() -> None:
    async with sessions(lease_s=0.05) as (url, _):
        env = maker(url)()
        await env.initial_messages()
        await Watched.closed.wait()
        with pytest.raises(http.EnvServerRefused, match=r"/step was refused with status 404: there is no session"):
            await env.step({"role": "assistant", "content": "7"})
        await env.close()


def answers(value: Any) -> Handler:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(value)

    return answer


GOOD = {"observation": {"messages": [{"role": "user", "content": "?"}]}}


@pytest.mark.parametrize(
    ("reset", "step", "expected"),
    [
        ([], None, "expected a JSON object"),
        ({}, None, "expected `observation`"),
        ({"observation": {"messages": [{"role": "user"}]}}, None, "`observation.messages`"),
        ({"observation": GOOD["observation"] | {"tools": [{"name": "x"}]}}, None, "`observation.tools`"),
        (GOOD, {"done": "no", "reward": 1}, "`done`, true or false"),
        (GOOD, {"done": True, "reward": "1"}, "`reward`, a number"),
        (GOOD, {"done": True, "reward": 1, "metrics": [1]}, "`metrics` and `logs`"),
        (GOOD, {"done": False, "reward": 1}, "expected `observation`"),
    ],
)
async def test_an_answer_that_is_none_is_said_to_be_the_server_s(reset: Any, step: Any, expected: str) -> None:
    app = web.Application()
    app.router.add_post("/sessions/{name}/reset", answers(reset))
    app.router.add_post("/sessions/{name}/step", answers(step))
    app.router.add_delete("/sessions/{name}", answers({}))
    async with serving(app) as url:
        with pytest.raises(http.BadEnvAnswer, match=expected) as bad:
            await play(maker(url)(), "7")
        assert url in str(bad.value)


async def test_a_session_that_was_not_begun_asks_nothing_and_one_whose_start_is_cancelled_is_ended() -> None:
    begun = asyncio.Event()

    class Slow(Watched):
        async def reset(self, task: dict[str, Any]) -> Any:
            begun.set()
            await asyncio.sleep(60)

    async with sessions(Slow) as (url, counts):
        make = maker(url)
        await make().close()
        env = make()
        start = asyncio.ensure_future(env.initial_messages())
        await begun.wait()
        start.cancel()
        await asyncio.wait([start])
        await env.close()
        assert counts == {"close": 1}


async def test_an_episode_continues_in_another_session_from_the_state_that_its_server_gave() -> None:
    class Counting:
        async def reset(self, task: dict[str, Any]) -> Any:
            self.turns = task.get("state", [0])[0]
            return {"observation": {"messages": [{"role": "user", "content": "Begin."}], "tools": [server.ADD]}}

        async def step(self, message: dict[str, Any], fault: str | None) -> Any:
            self.turns += 1
            reply = {"role": "user", "content": f"turn {self.turns}"}
            return {"observation": {"messages": [reply]}, "reward": 0.0, "done": self.turns == 3, "state": [self.turns]}

        async def close(self) -> None:
            pass

    async with serving(server.Sessions(Counting).app()) as url:
        make, heard = maker(url), {"role": "assistant", "content": "and"}
        first, second = make(), make()
        await first.initial_messages()
        assert first.state_dict() is None, "this server gives no state before the first turn"
        for _ in range(2):
            await first.step(heard)
        state = json.loads(json.dumps(first.state_dict()))
        third = asyncio.ensure_future(first.step(heard))
        await asyncio.sleep(0)
        assert first.state_dict() is None, "within a turn there is no state"
        assert (await third).episode_done
        await second.load_state_dict(state)
        assert second.state_dict() == state, "nothing was played since"
        assert second.tools == [server.ADD]
        assert (await second.step(heard)).episode_done, "it was the third turn of the episode"
        assert second.state_dict() == {"turn": 3, "tools": [server.ADD], "state": [3]}
        await first.close()
        await second.close()


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"step_s": 0}, "expected seconds above 0"),
        ({"batch_size": 0}, "expected at least 1"),
        ({"token_variable": "NOT_SET_ANYWHERE"}, "which is not set"),
        ({"speed": 1}, "unexpected keyword argument 'speed'"),
    ],
)
def test_arguments_that_do_not_suit(args: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        load_dataset(EnvConfig(id="http://127.0.0.1:8700", args=args), context())


def test_its_name_in_metrics_and_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENV_TOKEN", "secret")
    assert EnvConfig(id="https://host:8700/x").label == "https"
    connection = maker("https://host:8700", token_variable="ENV_TOKEN").args[0]
    assert connection.token == "secret"
    assert "secret" not in repr(connection)
