"""A server of environments: `python examples/envs/server.py --port 8700`, then `--env.id http://127.0.0.1:8700`.

It needs the package aiohttp and nothing of Trireme, so it runs where sandboxes run. `Addition` is the environment;
put yours in its place. `Sessions` is the protocol (docs/environments.md): it answers a request that comes again with
the answer of before, and ends sessions that no client asks for any more. An answer with a `state` lets a run that was
killed continue the episode: a reset then brings that state back, with the number of turns that it had seen.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

ADD = {
    "name": "add",
    "description": "Adds two whole numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


class Addition:
    """Asks for a sum; its tool is slow."""

    def __init__(self, tool_s: float = 2.0) -> None:
        self.tool_s = tool_s

    async def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        draw = random.Random(task["seed"])
        self.a, self.b = draw.randint(0, 99), draw.randint(0, 99)
        question = {"role": "user", "content": f"What is {self.a} + {self.b}? Answer with the number alone."}
        # The seed is all that another process needs to continue, so the state is empty.
        return {"observation": {"messages": [question], "tools": [ADD]}, "done": False, "state": {}}

    async def step(self, message: dict[str, Any], fault: str | None) -> dict[str, Any]:
        if not fault and (calls := message.get("tool_calls")):
            await asyncio.sleep(self.tool_s)
            answers = [{"role": "tool", "name": "add", "content": added(call["arguments"])} for call in calls]
            return {"observation": {"messages": answers}, "reward": 0.0, "done": False, "state": {}}
        right = float(not fault and message["content"].strip() == str(self.a + self.b))
        return {"observation": {}, "reward": right, "done": True, "metrics": {"success": right}}

    async def close(self) -> None:
        """Ends the sandbox, where there is one."""


def added(arguments: dict[str, Any]) -> str:
    try:
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (KeyError, TypeError, ValueError):
        return "error: a and b must be whole numbers"


class Session:
    """One environment, and its newest answer."""

    def __init__(self, env: Any, first: Any, turn: int) -> None:
        self.env, self.turn, self.answer = env, turn, asyncio.ensure_future(first)
        self.used = time.monotonic()


class Sessions:
    """Answers the requests of many sessions."""

    def __init__(self, make: Callable[[], Any], lease_s: float = 3600.0) -> None:
        self._make, self._lease_s, self._open = make, lease_s, {}
        self._ending: asyncio.Task[None] | None = None

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/sessions/{session}/reset", self.reset)
        app.router.add_post("/sessions/{session}/step", self.step)
        app.router.add_delete("/sessions/{session}", self.close)
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)
        return app

    async def reset(self, request: web.Request) -> web.Response:
        name, task = request.match_info["session"], await request.json()
        turn = task.get("turn", 0)
        if name not in self._open:
            env = self._make()
            self._open[name] = Session(env, env.reset(task), turn)
        return await self._answer(name, turn)

    async def step(self, request: web.Request) -> web.Response:
        name, body = request.match_info["session"], await request.json()
        session = self._open.get(name)
        if session and body["turn"] == session.turn + 1 and session.answer.done():
            action = body["action"]
            session.answer = asyncio.ensure_future(session.env.step(action["message"], action["fault"]))
            session.turn += 1
        return await self._answer(name, body["turn"])

    async def close(self, request: web.Request) -> web.Response:
        session = self._open.pop(request.match_info["session"], None)
        if session:
            session.answer.cancel()
            await session.env.close()
        return web.json_response({})

    async def _answer(self, name: str, turn: int) -> web.Response:
        session = self._open.get(name)
        if session is None:
            raise web.HTTPNotFound(text=f"there is no session {name}: it has ended, or this server was started anew")
        if turn != session.turn:
            raise web.HTTPConflict(text=f"session {name} is at turn {session.turn}, not {turn}")
        session.used = time.monotonic()
        try:
            return web.json_response(await asyncio.shield(session.answer))  # it continues if this request is given up
        except Exception as error:
            raise web.HTTPInternalServerError(text=f"{type(error).__name__}: {error}") from error

    async def _start(self, _app: web.Application) -> None:
        self._ending = asyncio.ensure_future(self._end_leases())

    async def _stop(self, _app: web.Application) -> None:
        if self._ending:
            self._ending.cancel()
        for session in self._open.values():
            await session.env.close()

    async def _end_leases(self) -> None:
        while True:
            await asyncio.sleep(min(10.0, self._lease_s))
            over = time.monotonic() - self._lease_s
            for name in [name for name, s in self._open.items() if s.answer.done() and s.used < over]:
                await self._open.pop(name).env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8700)
    parser.add_argument("--tool-s", type=float, default=2.0, help="seconds that each call of the tool takes")
    args = parser.parse_args()
    web.run_app(Sessions(lambda: Addition(args.tool_s)).app(), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
