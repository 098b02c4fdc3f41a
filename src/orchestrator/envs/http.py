"""Environments behind a URL: sandboxes, browsers and games that run on other machines. In this module a session is one
episode on such a server, and has nothing to do with the sessions of agents.

    HttpEnv --POST /sessions/ID/reset {seed, task, split, ...}--> server    {observation: {messages, tools}}
            --POST /sessions/ID/step {turn, action, timeout_s}--> server    {observation: {messages}, reward, done, ...}
            --DELETE /sessions/ID-----------------------------> server

A rollout outlives the run's process if the server's answers also have a `state`, any JSON value: after a resume, a
reset of another session sends the newest state and its turn, and the server continues from there.

`env.id` is the server's URL. Prompts and answers are chat messages: the renderer stays here, so the server needs no
tokenizer. The names come from OpenEnv, but OpenEnv's own servers are not supported: over HTTP they make a new
environment for each request, and their sessions live in a WebSocket, which a lost connection ends.

Here the client names the session and numbers the turns. A server answers a request that it has answered before, or is
still working on, with the same answer. So the client sends a request again when its answer was lost, until the
request's time limit.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from orchestrator.env import EnvGroupBuilder
from orchestrator.envs.text import GeneratedDataset
from orchestrator.message_env import MessageEnv, MessageEnvGroup, MessageStep
from trireme.core.finite_json import to_json
from trireme.renderers import Message, ToolSpec

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait before the second try of a request, the third and so on. The last pause repeats."""
CONNECT_S = 10.0
CLOSE_S = 20.0
BUSY = frozenset({429, 502, 503, 504})
"""HTTP status codes of a server that may accept the same request later."""
SHOWN = 300
"""The most characters of a wrong answer that an error shows."""
SENT = ("role", "content", "thinking", "tool_calls")
"""The fields of the assistant's message that a server gets."""


class EnvServerDown(Exception):
    """A server of environments could not be reached, or did not answer in time."""


class EnvServerRefused(Exception):
    """A server refused a request, for example for a session that no longer exists, or the server's environment
    failed."""


class BadEnvAnswer(Exception):
    """A server's answer violates the protocol."""


@dataclass(frozen=True)
class EnvServer:
    """A server of environments: its address, and the time limits of one session's requests in seconds."""

    url: str
    """The server's address, to which paths are added."""
    reset_s: float
    """Limit for the start of a session, with all tries."""
    step_s: float
    """Limit for a turn, with all tries. The server gets this limit too."""
    token: str | None = field(default=None, repr=False)
    """Sent as bearer token."""

    def connect(self) -> aiohttp.ClientSession:
        """Opens an HTTP client for one session; all turns of the session share its connection."""
        if self.token is None:
            headers = {}
        else:
            headers = {"Authorization": f"Bearer {self.token}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        return aiohttp.ClientSession(headers=headers, timeout=timeout, json_serialize=to_json)

    async def ask(
        self, client: aiohttp.ClientSession, method: str, path: str, body: Mapping[str, object] | None, limit_s: float
    ) -> Mapping[str, Any]:
        """Sends a request by `client`, repeats it until the server answers, and returns the JSON object of the answer.
        Raises EnvServerDown if there is no answer within `limit_s` seconds, EnvServerRefused for a status of 400 or
        more that is not in BUSY, and BadEnvAnswer if the answer is no JSON object."""
        url = f"{self.url}/{path}"
        failure = "no answer to the first try"
        tries = 0
        try:
            async with asyncio.timeout(limit_s) as limit:
                while True:
                    tries += 1
                    try:
                        async with client.request(method, url, json=body) as reply:
                            text = await reply.text(errors="replace")
                        if reply.status not in BUSY:
                            return _read(f"{method} {url}", reply.status, text)
                        failure = f"status {reply.status}"
                    except (aiohttp.ClientError, OSError) as error:
                        failure = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(PAUSES_S[min(tries, len(PAUSES_S)) - 1])
        except TimeoutError:
            if not limit.expired():
                raise
            raise EnvServerDown(
                f"{method} {url} was not answered within {limit_s:g} s ({tries} tries; the last failure: {failure}). "
                "Is the server up, and the limit long enough (env.args.step_s and reset_s of an environment)?"
            ) from None


def _read(request: str, status: int, text: str) -> Mapping[str, Any]:
    if status >= 400:
        raise EnvServerRefused(f"{request} was refused with status {status}: {text[:SHOWN]}")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise BadEnvAnswer(f"{request} was answered with {text[:SHOWN]!r}; expected a JSON object")
    return answer


class HttpEnv(MessageEnv):
    """One episode, played in one session of a server of environments."""

    def __init__(self, server: EnvServer, task: Mapping[str, object]) -> None:
        self._server = server
        self._task = task
        self._path = f"sessions/{uuid.uuid4().hex}"
        self._client: aiohttp.ClientSession | None = None
        self._turn = 0
        self._state: Mapping[str, Any] | None = None
        """{"state": the state that the server sent after the last turn}, because null is a state too; None if the
        server sent no state, or has not answered the present turn yet."""

    async def initial_messages(self) -> Sequence[Message]:
        answer = await self._reset({})
        self.tools = self._tools(answer)
        return self._messages(answer)

    async def step(self, message: Message) -> MessageStep:
        return await self._play(message, None)

    async def unreadable(self, message: Message, cut_off: bool) -> MessageStep:
        return await self._play(message, "cut_off" if cut_off else "malformed")

    def state_dict(self) -> Mapping[str, Any] | None:
        if self._state is None:
            return None
        return {"turn": self._turn, "tools": list(self.tools), **self._state}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._turn = state["turn"]
        self.tools = state["tools"]
        await self._reset({"turn": self._turn, "state": state["state"]})
        self._state = {"state": state["state"]}

    async def close(self) -> None:
        if self._client is None:
            return
        try:
            await self._server.ask(self._client, "DELETE", self._path, None, CLOSE_S)
        finally:
            await self._client.close()

    async def _reset(self, begun: Mapping[str, Any]) -> Mapping[str, Any]:
        body = {**self._task, "episode_id": self._path.rpartition("/")[2], **begun}
        return await self._post("reset", body, self._server.reset_s)

    async def _play(self, message: Message, fault: str | None) -> MessageStep:
        self._turn += 1
        sent = {name: message[name] for name in SENT if name in message}  # type: ignore[literal-required]
        body = {"turn": self._turn, "action": {"message": sent, "fault": fault}, "timeout_s": self._server.step_s}
        answer = await self._post("step", body, self._server.step_s)
        episode_done = answer.get("done")
        reward = answer.get("reward")
        metrics = answer.get("metrics") or {}
        logs = answer.get("logs") or {}
        if not isinstance(episode_done, bool) or not isinstance(reward, int | float | None) or isinstance(reward, bool):
            raise self._bad("step", answer, "`done`, true or false, and `reward`, a number")
        if not isinstance(metrics, dict) or not isinstance(logs, dict):
            raise self._bad("step", answer, "`metrics` and `logs` as objects")
        next_messages = () if episode_done else self._messages(answer)
        return MessageStep(reward or 0.0, episode_done, next_messages, metrics, logs, answer.get("in_loss", True))

    async def _post(self, verb: str, body: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
        if self._client is None:
            self._client = self._server.connect()
        self._state = None  # until the answer is there, nothing is known that an episode could continue from
        answer = await self._server.ask(self._client, "POST", f"{self._path}/{verb}", body, limit_s)
        if "state" in answer:
            self._state = {"state": answer["state"]}
        else:
            self._state = None
        return answer

    def _messages(self, answer: Mapping[str, object]) -> list[Message]:
        messages = self._observation(answer).get("messages")
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise self._bad("session", answer, "`observation.messages`: messages, each with `role` and `content`")
        return messages

    def _tools(self, answer: Mapping[str, object]) -> list[ToolSpec]:
        tools = self._observation(answer).get("tools") or []
        needed = ToolSpec.__required_keys__
        if not isinstance(tools, list) or not all(isinstance(tool, dict) and needed <= tool.keys() for tool in tools):
            raise self._bad("reset", answer, "`observation.tools`, each with `name`, `description` and `parameters`")
        return tools

    def _observation(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(observation := answer.get("observation"), dict):
            raise self._bad("session", answer, "`observation`, an object")
        return observation

    def _bad(self, verb: str, answer: Mapping[str, object], expected: str) -> BadEnvAnswer:
        return BadEnvAnswer(f"{self._server.url}, {verb}: answered {to_json(answer)[:SHOWN]}; expected {expected}")


def _allow_connections() -> None:
    """Increases this process's limit of open files to the most that the system allows, because each session has a
    connection."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


@dataclass(kw_only=True)
class HttpDataset(GeneratedDataset):
    """The tasks of a server, as `num_batches` batches of `batch_size`. Task n of a split is the same each time.

    `options` are sent with each reset. `token_variable` names the environment variable that holds the bearer token.
    Raises ValueError for limits (`reset_s`, `step_s`) that are not above 0, for sizes below 1, and if that variable is
    not set.
    """

    name = "http"

    url: str
    options: Mapping[str, object] = field(default_factory=dict)
    reset_s: float = 300.0
    step_s: float = 300.0
    token_variable: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.reset_s, self.step_s) <= 0:
            raise ValueError(f"reset_s = {self.reset_s}, step_s = {self.step_s}; expected seconds above 0")
        if self.token_variable:
            token = os.environ.get(self.token_variable)
        else:
            token = None
        if self.token_variable and token is None:
            raise ValueError(
                f"token_variable names the environment variable {self.token_variable!r}, which is not set in this "
                "process"
            )
        _allow_connections()
        self._server = EnvServer(self.url.rstrip("/"), self.reset_s, self.step_s, token)

    def builders(self, numbers: Sequence[int]) -> list[EnvGroupBuilder]:
        renderer = self.context.renderer
        size = self.context.group_size
        return [MessageEnvGroup(self._maker(number), renderer, size) for number in numbers]

    def _maker(self, number: int) -> partial[HttpEnv]:
        task = {
            **self.options,
            "seed": self.rng(number).getrandbits(32),
            "task": number,
            "split": self.context.split,
        }
        return partial(HttpEnv, self._server, task)
