"""Requests that no client would send, to every listener: with letters that are not ASCII in paths, headers and keys.
Whoever asks, no answer is an error of the server."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import agents_support
import pytest
from console_support import make_live_run, reader_of
from ports_support import status_of
from service_support import ADMIN, CLIENT, served
from tinker_support import KEY, tinker_server

import orchestrator.agents
from service.console.serving import make_console_app
from service.keys import ServiceKey
from service.ports import http_server
from service.routes import CONSOLE_ROUTES, ROUTES

REQUESTS, AT_ONCE, ANSWER_S = 600, 8, 60.0
METHODS = ["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE", "XYZ"]
ODD = [
    "é",
    "%C3%A9",
    "%FF%FE",
    "%00",
    "%2F..%2F",
    "%ED%A0%80",
    "²",
    "١",
    "%D9%A1",
    "9" * 5000,
    "-1",
    "1e9",
    "😀",
    "%",
    "",
]
ODD += ["a", "1", "none", ".", "..", "~", "%0D%0A", "\x01", "tinker://x", "K", "%25", "?", "#", "[", "9999999999"]
SOUND = [each for each in ODD if each.isascii() and each.isprintable()]
"""Those that a parser of HTTP lets into a path."""
TINKER = [
    "/signed/{until}/{signature}/{model_id}/{name}/{file}",
    "/signed/9999999999/{signature}/m/n/f",
    "/api/v1/healthz",
    "/api/v1/samplers/{sampler_id}",
    "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}",
    "/api/v1/training_runs?limit={limit}&offset={offset}",
    "/api/v1/sessions?limit={limit}&offset={offset}",
    "/api/v1/sessions/{session_id}",
    "/api/v1/retrieve_future",
    "/api/v1/create_session",
    "/api/v1/asample",
    "/api/v1/forward_backward",
]
SERVICE = [route.path for route in (*ROUTES, *CONSOLE_ROUTES)]
CONSOLE = [
    f"{path}?step={{s}}&group={{g}}&rollout={{r}}&name={{n}}&attempt={{a}}" for path in SERVICE if "/api" in path
]
HEADERS = [
    "Authorization",
    "X-Api-Key",
    "Host",
    "Content-Type",
    "Accept",
    "Cookie",
    "Range",
    "X-é",
    "Upgrade",
    "Expect",
]
HEADERS += [
    "Content-Length",
    "Transfer-Encoding",
    "Content-Encoding",
    "X-Forwarded-For",
    "Forwarded",
    "Idempotency-Key",
]
HEADERS += ["X-Stainless-Retry-Count", "If-None-Match", "Origin"]
BODIES = ["", "{}", "[]", "null", "é", '{"session_id": "²"}', '{"request_id": "a/²"}', "\x00", '"\\ud800"']


def request(draw: random.Random, paths: Sequence[str], keys: Sequence[str]) -> bytes:
    path = draw.choice(paths) if draw.random() < 0.9 else "/" + draw.choice(ODD)
    odd = draw.choice([ODD, SOUND, SOUND])
    while "{" in path:
        start, end = path.index("{"), path.index("}")
        path = path[:start] + draw.choice(odd) + path[end + 1 :]
    lines = [f"{draw.choice([*METHODS[:2] * 6, *METHODS])} {path or '/'} HTTP/1.1"]
    lines += [f"{draw.choice(HEADERS)}: {draw.choice(ODD)}" for _ in range(draw.choice([0, 0, 0, 1, 2]))]
    if draw.random() < 0.7:
        lines.append("Host: 127.0.0.1")
    if draw.random() < 0.7:
        key = draw.choice([*keys * 10, *ODD, *(f"{key}é" for key in keys), "tr-session-é-²", "tr-session--"])
        lines.append(draw.choice([f"Authorization: Bearer {key}", f"x-api-key: {key}", f"authorization: é {key}"]))
    body = draw.choice(BODIES).encode() if draw.random() < 0.3 else b""
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    encoding = draw.choice(["utf-8", "utf-8", "utf-16-le" if draw.random() < 0.1 else "utf-8"])
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode(encoding) + body


async def status(port: int, sent: bytes) -> int:
    """The status of the answer; 0 where the connection was closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        with suppress(ConnectionError):
            return status_of(await asyncio.wait_for(reader.readline(), ANSWER_S))
        return 0
    finally:
        writer.close()


@asynccontextmanager
async def listeners(directory: Path) -> AsyncIterator[dict[str, tuple[int, Sequence[str]]]]:
    """The port of each listener, and paths that it has."""
    reader = reader_of(make_live_run(directory / "run"))
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(served("4", run=reader))
        await stack.enter_async_context(agents_support.rollout("4"))
        agents: object = orchestrator.agents._current
        tinker = stack.enter_context(tinker_server(directory / "tinker"))
        found = {
            "service": (int(service.url.rpartition(":")[2]), SERVICE),
            "agents": (agents._server.port, SERVICE),  # type: ignore[attr-defined]
            "tinker": (int(tinker.url.rpartition(":")[2]), TINKER),
        }
        for name, keys in (("console", []), ("console with keys", [ServiceKey("admin", ADMIN)])):
            server = http_server(make_console_app(reader, keys), "127.0.0.1", 0)
            await server.open()
            stack.push_async_callback(server.close)
            found[name] = (server.port, CONSOLE)
        yield found


async def failures(directory: Path, number: int) -> list[tuple[str, bytes, int]]:
    """Sends `number` requests to each listener. Returns those whose answers say that the server failed."""
    wrong: list[tuple[str, bytes, int]] = []
    statuses: dict[str, set[int]] = {}

    async def client(name: str, port: int, paths: Sequence[str], seed: int) -> None:
        draw = random.Random(f"{name} {seed}")
        for _ in range(number // AT_ONCE + 1):
            sent = request(draw, paths, (ADMIN, CLIENT, KEY))
            answer = await status(port, sent)
            statuses.setdefault(name, set()).add(answer)
            if answer >= 500 or answer == 0:
                wrong.append((name, sent, answer))

    async with listeners(directory) as all_of_them:
        await asyncio.gather(
            *(client(name, port, paths, seed) for name, (port, paths) in all_of_them.items() for seed in range(AT_ONCE))
        )
    for name, each in statuses.items():  # requests come past the parser and the guard
        assert len(each | {400, 401}) > 3, (name, each)
    return wrong


def test_no_request_makes_an_error_of_a_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(failures(tmp_path, REQUESTS)) == []
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [message for message in messages if "Event loop is closed" not in message] == []  # that of another test
