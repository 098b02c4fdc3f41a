"""Rollouts that agents play, with OpenAI's own client over loopback: what is trained is what was sampled for them and
delivered, each token once."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from agents_support import KEY, MAX_LEN, Play, Plays, ask, open_sessions, rollout, trained, user
from renderer_support import QWEN3, bpe
from waiting import wait_for_tasks

from orchestrator.agents import NoAnswer
from orchestrator.env import AgentEnv, EnvContext, load_dataset
from orchestrator.envs.agent import AgentRun
from orchestrator.rollout import AnswerTimeout, BadReward
from trireme.config.orchestrator import EnvConfig
from trireme.core.agents import AgentAccess
from trireme.core.errors import BadInput, BadRequest, RoomFailed
from trireme.core.finite_json import to_json

EXAMPLE = Path(__file__).parents[3] / "examples" / "agents"


def needs(program: str) -> pytest.MarkDecorator:
    absent = shutil.which(program) is None
    return pytest.mark.skipif(absent, reason=f"there is no {program}")  # reason: Node is no package of Python


def dataset(env_id: str, **args: Any) -> Any:
    context = EnvContext(bpe(QWEN3), seed=3, group_size=2)
    return load_dataset(EnvConfig(id=env_id, args=args), context)


def sums(*command: str) -> Any:
    """A problem of the example whose agent is a program."""
    return dataset("agent:command", command=list(command), problems=str(EXAMPLE / "sums.jsonl")).get_batch(0)[0]


@needs("node")
async def test_a_program_in_another_language_is_an_agent() -> None:
    group = sums("node", str(EXAMPLE / "sums.mjs"))
    async with rollout("wrong", str(sum(group.problem.values()))) as session:
        trajectory = await session.play_env(await group.make_env(0))
        assert trajectory.reward == 0.5
        assert trajectory.transitions[-1].metrics["tries"] == 2
        assert trained(trajectory) == session.sampled
        assert len(session.record) == 2
        assert open_sessions() == 0


@pytest.fixture(scope="module")
def node_agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with OpenAI's client for Node, and what it needs alongside it."""
    place = tmp_path_factory.mktemp("node") / "agent"
    ignored = shutil.ignore_patterns("node_modules", "package-lock.json")
    shutil.copytree(EXAMPLE / "tools-in-node", place, ignore=ignored)
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--cache", str(place / "cache")]
    completed = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120, check=False)
    if completed.returncode:
        pytest.skip(f"npm: {completed.stderr[-300:]}")  # reason: npm cannot install openai, without a registry for one
    return place / "agent.mjs"


@needs("npm")
async def test_openais_client_for_node_is_an_agent_with_a_tool(node_agent: Path) -> None:
    group = sums("node", str(node_agent))
    call = f'<tool_call>\n{{"name": "add", "arguments": {to_json(group.problem)}}}\n</tool_call>'
    async with rollout(call, str(sum(group.problem.values()))) as session:
        trajectory = await session.play_env(await group.make_env(0))
        assert trajectory.reward == 1.0
        assert trajectory.transitions[-1].metrics["tool_calls"] == 1
        assert trained(trajectory) == session.sampled
        assert trajectory.num_segments == 1


async def test_a_linear_agent_is_one_growing_sequence_sampled_as_the_run_samples() -> None:
    async def play(client: openai.AsyncOpenAI) -> Any:
        messages = [user("q0")]
        for turn in range(3):
            messages += [await ask(client, *messages, temperature=0.1, seed=9), user(f"q{turn + 1}")]
        return 0.5, {"turns": 3}

    async with rollout("one", "two", "three") as run:
        trajectory = await run.play(play)
        assert trajectory.num_segments == 1
        assert trained(trajectory) == run.sampled
        assert (trajectory.reward, [turn.reward for turn in trajectory.turns]) == (0.5, [0.0, 0.0, 0.5])
        assert trajectory.turns[-1].metrics["turns"] == 3
        assert trajectory.turns[-1].metrics["session/roots"] == 1
        requests = run.sampler.requests
        assert [request.request_id for request in requests] == [f"0.1.2/3/0/{turn}" for turn in range(3)]
        assert [request.params.seed for request in requests] == [KEY.seed(5, turn) for turn in range(3)]
        assert {(request.params.temperature, request.route_key) for request in requests} == {(0.7, "0.1.2/0")}
        assert requests[2].prompt.tolist()[: len(requests[1].prompt)] == requests[1].prompt.tolist()
        assert open_sessions() == 0


async def test_a_sub_agent_and_calls_at_once_are_branches_and_each_token_is_trained_once() -> None:
    async def play(client: openai.AsyncOpenAI) -> float:
        first = await ask(client, user("q"))
        best = await ask(client, user("q"), first, user("best of"), n=2)
        helper = await asyncio.gather(*(ask(client, user("help")) for _ in range(3)))
        await ask(client, user("q"), first, user("best of"), best[1], user(helper[0]["content"]))
        await ask(client, user("q"), first, user("go back"))
        return 1.0

    async with rollout(*(f"text {n}" for n in range(8))) as run:
        trajectory = await run.play(play)
        assert sorted(trained(trajectory)) == sorted(run.sampled)
        assert len(run.record) == len(trajectory.turns) == 8
        prompts = {tuple(tokens.tolist()): request.prompt.tolist() for tokens, request in run.pairs}
        for turn in trajectory.transitions:
            assert turn.observation.tolist() == prompts[tuple(turn.action.tolist())]
        assert trajectory.num_segments == 6
        assert trajectory.reward == 1.0


async def test_the_error_of_an_agent_is_that_of_its_rollout_and_its_session_is_closed() -> None:
    async def play(client: openai.AsyncOpenAI) -> float:
        await ask(client, user("q"))
        raise ValueError("a bug of the agent")

    async with rollout("one") as run:
        env = Plays(play)
        with pytest.raises(ValueError, match="a bug of the agent"):
            await run.play_env(env)
        assert open_sessions() == 0
        with pytest.raises(openai.APIStatusError) as closed:
            await Plays(asks()).play(env.access)
        assert closed.value.status_code == 410


@pytest.mark.parametrize("hangs", [False, True])
async def test_the_error_of_a_room_is_raised_whatever_the_agent_makes_of_it(hangs: bool) -> None:
    async def play(client: openai.AsyncOpenAI) -> Any:
        with pytest.raises(openai.InternalServerError):
            await ask(client, user("q"))
        if hangs:
            await asyncio.Event().wait()
        return 1.0

    async with rollout(RoomFailed("no replica is left")) as run:
        with pytest.raises(RoomFailed, match="no replica is left"):
            async with asyncio.timeout(0.3 if hangs else 60):
                await run.play(play)


def asks(times: int = 1, result: Any = 1.0) -> Play:
    """Returns an agent that asks so often."""

    async def play(client: openai.AsyncOpenAI) -> Any:
        for _ in range(times):
            await ask(client, user("q"))
        return result

    return play


async def test_a_request_that_replicas_refuse_is_refused_to_the_agent_and_ends_its_rollout() -> None:
    async with rollout(BadRequest("temperature must be in [0, 2]")) as run:
        with pytest.raises(BadRequest, match="temperature must be in") as refused:
            await run.play(asks())
        assert isinstance(refused.value.__cause__, openai.BadRequestError)


@pytest.mark.parametrize(
    ("agent", "error", "reason"),
    [
        (asks(0), NoAnswer, "nothing to train on"),
        (asks(result="much"), BadReward, "expected a number"),
        (asks(result=1e300), BadReward, r"expected one within -2\^53 and 2\^53"),
    ],
)
async def test_what_an_agent_must_give(agent: Play, error: type[Exception], reason: str) -> None:
    async with rollout("one") as run:
        with pytest.raises(error, match=reason):
            await run.play(agent)


async def test_a_conversation_that_is_too_long_is_refused_to_the_agent_alone() -> None:
    async def play(client: openai.AsyncOpenAI) -> float:
        await ask(client, user("q"))
        with pytest.raises(openai.BadRequestError):
            await ask(client, user("word " * MAX_LEN))
        return 0.25

    async with rollout("one") as run:
        trajectory = await run.play(play)
        assert trained(trajectory) == run.sampled
        assert trajectory.reward == 0.25


async def test_a_cancelled_rollout_ends_what_is_sampled_and_its_session() -> None:
    async with rollout("one") as run:
        run.sampler.hold = asyncio.Event()
        task = asyncio.ensure_future(run.play(asks()))
        await wait_for_tasks(lambda: run.sampler.requests, "the sample")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert run.sampler.cancelled == 1
        assert open_sessions() == 0


async def test_the_example_plays_with_its_tool() -> None:
    problems = dataset("agent:calculator:play", count=20, batch_size=8)
    assert [len(problems.get_batch(index)) for index in range(len(problems))] == [8, 8, 4]
    again = dataset("agent:calculator:play", count=20)
    assert [group.problem for group in again.get_batch(0)][:8] == [group.problem for group in problems.get_batch(0)]
    problem = problems.get_batch(0)[0]
    a, b = problem.problem
    call = f'<tool_call>\n{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
    async with rollout(call, str(a * b)) as run:
        trajectory = await run.play_env(await problem.make_env(0))
        assert (trajectory.reward, trajectory.turns[-1].metrics["session/turns"]) == (1.0, 2)
        assert trajectory.num_segments == 1
        assert trained(trajectory) == run.sampled
        assert str(a * b) in run.sampler.tokenizer.decode(run.sampler.requests[1].prompt)


async def test_the_example_asks_helpers_and_shortens_its_history() -> None:
    problem = dataset("agent:delegating:play", count=20).get_batch(0)[0]
    sides = problem.problem
    area = sides[0] * sides[1] + sides[2] * sides[3] + sides[4] * sides[5]

    def calls(*questions: str) -> str:
        call = '<tool_call>\n{{"name": "helper", "arguments": {{"question": "{0}"}}}}\n</tool_call>'
        return "\n".join(call.format(question) for question in questions)

    texts = [calls("q1", "q2"), "h1", "h2", calls("q3"), "h3", calls(""), "h4", "my notes", f" {area}"]
    async with rollout(*texts) as run:
        trajectory = await run.play_env(await problem.make_env(0))
        metrics = trajectory.turns[-1].metrics
        assert (trajectory.reward, metrics["helpers"], metrics["compactions"]) == (1.0, 4, 1)
        assert (metrics["session/roots"], metrics["session/retokenised"]) == (6, 0)
        assert trajectory.num_segments == 6, "four helpers, and the history before and after it was shortened"
        assert sorted(trained(trajectory)) == sorted(run.sampled)
        assert len(run.record) == len(texts)
        prompt = run.sampler.tokenizer.decode(run.sampler.requests[-1].prompt)
        assert "Your notes: my notes" in prompt
        assert "h1" not in prompt


@pytest.mark.parametrize(
    ("env_id", "reason"),
    [
        ("agent:calculator", "whose function  cannot be loaded from calculator: KeyError"),
        ("agent:calculator:nothing", "function nothing cannot be loaded from calculator: KeyError: 'nothing'"),
        ("agent:delegating:user", "a coroutine that takes one AgentRun"),
        ("agent:not_there:play", "cannot be loaded from not_there: ModuleNotFoundError: No module named 'not_there'"),
        ("agent:", "whose function  cannot be loaded from : ValueError: Empty module name"),
    ],
)
def test_agents_that_are_refused(env_id: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        dataset(env_id)


def test_the_key_of_an_agent_is_not_shown() -> None:
    assert "secret" not in repr(AgentRun("u", "a", api_key="secret", problem=(1, 2), sample=3))


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
        assert [turn.stop_reason for turn in trajectory.turns] == ["stop", "stop", "length"], "the helper's is last"
        assert trajectory.stop_reason == "stop"
        assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0, 0.0]
        assert "session/roots" in trajectory.turns[1].metrics


async def test_an_agent_cannot_reward_itself_with_the_key_that_it_has() -> None:
    """Nor does it open, export or forget sessions: the port has no such routes, whatever the key."""
    async with rollout("one") as run:
        env = Plays(lambda client: cheat(client))

        async def cheat(client: openai.AsyncOpenAI) -> float:
            await ask(client, user("q"))
            base = env.access.anthropic_base_url
            sessions = base.rpartition("/")[0]
            key = {"x-api-key": env.access.api_key}
            async with httpx.AsyncClient() as http:
                for method, url in (
                    *(("POST", f"{base}/reward"), ("GET", f"{base}/export"), ("DELETE", base)),
                    *(("POST", sessions), ("GET", sessions)),
                ):
                    assert (await http.request(method, url, json={"value": 1000}, headers=key)).status_code == 403
                    assert (await http.request(method, url)).status_code == 401
                shown = await http.get(sessions.removesuffix("/sessions") + "/openapi.json", headers=key)
                assert not [path for path in shown.json()["paths"] if path.endswith(("/reward", "/export"))]
            return 0.0

        trajectory = await run.play_env(env)
        assert trajectory.reward == 0
        assert not [name for turn in trajectory.turns for name in turn.metrics if "reward" in name]


async def test_an_agent_is_told_why_it_gets_no_answer_and_may_ask_again() -> None:
    late = AnswerTimeout(f"{KEY}: an answer took longer than 9 s")

    async def play(client: openai.AsyncOpenAI) -> float:
        with pytest.raises(openai.InternalServerError, match="an answer took longer than 9 s") as refused:
            await ask(client, user("q"))
        assert refused.value.status_code == 503
        await ask(client, user("q"))
        return 1.0

    async def fails(client: openai.AsyncOpenAI) -> float:
        await play(client)
        raise ValueError("a bug of the agent")

    async with rollout(late, "one") as run:
        assert trained(await run.play(play)) == run.sampled
        with pytest.raises(ValueError, match="a bug of the agent"):
            await run.play(fails)
        with pytest.raises(AnswerTimeout):
            await run.play(asks())


async def test_an_agent_whose_orchestrator_was_lost_gets_no_answer_of_the_next_one() -> None:
    """Its program may live longer, and find another orchestrator at the same port: it must not begin a session anew."""
    lost = Plays(asks())
    async with rollout("one") as run:
        await run.play_env(lost)
    answers: list[httpx.Response] = []

    async def play(client: openai.AsyncOpenAI) -> float:
        await ask(client, user("q"))
        here = httpx.URL(str(client.base_url))
        body = {"model": "policy", "messages": [user("q")]}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {lost.access.api_key}"}) as other:
            for base in (httpx.URL(lost.access.base_url).copy_with(port=here.port), here.copy_with(path="/v1")):
                answers.append(await other.post(f"{base}/chat/completions", json=body))
        return 1.0

    async with rollout("one") as run:
        trajectory = await run.play(play)
        assert (trajectory.turns[-1].metrics["session/roots"], len(run.record)) == (1, 1)
    codes = [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]
    assert codes == [(401, "invalid_api_key")] * 2
