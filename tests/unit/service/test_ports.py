"""What a client without a key can cost a server: little. It is in a process of its own, where that is measured."""

import asyncio
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from select import select

import agents_support
import pytest
from console_support import make_live_run, reader_of
from ports_support import Cost, Watched, flood, read_to_the_end, response_status, status_of, watched_server
from service_support import ADMIN, CLIENT, served
from tinker_support import KEY, tinker_server
from waiting import wait_for

import orchestrator.agents
from service.console.standalone import make_console_app
from service.keys import ServiceKey
from service.ports import HEAD_BYTES, PENDING_CONNECTIONS, http_server
from service.routes import CONSOLE_ROUTES, ROUTES

BOUND = Cost(megabytes=32.0, blocked_s=0.1)
HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n"
TOO_MANY = 160 * 10**6
HALF_OPEN = 3000
LATE_S, DEADLINE_S = 5.0, 30.0
HEAD_S = 3.0


@pytest.fixture(scope="module")
def server() -> Iterator[Watched]:
    with watched_server() as server:
        for _ in range(3):  # what is imported and kept at the first requests is no cost of later ones
            assert status_of(response_to(server, HEALTH + b"Connection: close\r\n\r\n")) == 401
        yield server


def response_to(server: Watched, request: bytes) -> bytes:
    with server.connect() as connection:
        connection.sendall(request)
        return read_to_the_end(connection)


def check_cost(server: Watched) -> None:
    cost = server.cost()
    assert cost.megabytes < BOUND.megabytes, cost
    assert cost.blocked_s < BOUND.blocked_s, cost


FLOODS = {
    "headers": (HEALTH, b"a-header: " + b"x" * 10_000 + b"\r\n"),
    "one header": (HEALTH + b"a-header: ", b"x" * 10_000),
    "short headers": (HEALTH, b"a:b\r\n" * 2000),
    "a path": (b"GET /", b"x" * 10_000),
    "no request": (b"", b"\r\n" * 5000),
    "headers behind a body": (HEALTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a-header: x\r\n" * 1000),
    "requests": (b"", (HEALTH + b"\r\n") * 200),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_head_without_end_is_cut_off(server: Watched, kind: str) -> None:
    server.cost()
    with server.connect() as connection:
        assert flood(connection, *FLOODS[kind], size=TOO_MANY) < TOO_MANY / 10
    check_cost(server)


@pytest.mark.parametrize(("excess", "status"), [(0, 401), (1, 400)])
def test_a_head_may_have_as_many_bytes_as_are_allowed(server: Watched, excess: int, status: int) -> None:
    start, end = HEALTH + b"a-header: ", b"\r\n\r\n"
    assert status_of(response_to(server, start + b"x" * (HEAD_BYTES - len(start + end) + excess) + end)) == status


def test_connections_without_a_key_give_way_to_new_ones(server: Watched) -> None:
    """Also while thousands hold a large part of a head, a client with a key is served."""
    persistent = server.connect()
    request = HEALTH + f"X-API-Key: {KEY}\r\n\r\n".encode()
    closing = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    persistent.sendall(request)
    assert response_status(persistent) == 200
    server.cost()
    half_open: list[socket.socket] = []
    try:
        for number in range(HALF_OPEN):
            half_open.append(server.connect())
            half_open[-1].sendall(HEALTH + b"a-header: " + b"x" * (HEAD_BYTES // 2))
            if number % 500 == 0:
                started = time.monotonic()
                assert status_of(response_to(server, closing)) == 200
                assert time.monotonic() - started < LATE_S
        persistent.sendall(request)
        assert response_status(persistent) == 200
        half_open[0].settimeout(LATE_S)
        assert read_to_the_end(half_open[0]) == b"", "the oldest is closed"
        wait_for(lambda: still_open(half_open) <= PENDING_CONNECTIONS, "connections to be closed")
    finally:
        for connection in [*half_open, persistent]:
            connection.close()
    check_cost(server)


def still_open(connections: list[socket.socket]) -> int:
    number = 0
    for connection in connections:
        connection.setblocking(False)
        try:
            connection.recv(1)
        except BlockingIOError:
            number += 1
        except ConnectionError:
            continue
    return number


def test_a_head_must_come_in_time() -> None:
    """However often its client sends a letter more."""
    with watched_server(HEAD_S) as server:
        started = time.monotonic()
        slow = {start: server.connect() for start in (b"", b"GET /", b"\r\n")}
        statuses: dict[bytes, int] = {}
        for start, connection in slow.items():
            connection.sendall(start)
        while len(statuses) < len(slow) and time.monotonic() - started < HEAD_S + DEADLINE_S:
            for start in slow.keys() - statuses.keys():
                if select([slow[start]], [], [], 0.2)[0]:
                    assert time.monotonic() - started > HEAD_S - 1
                    statuses[start] = response_status(slow[start])
                else:
                    slow[start].sendall(start[-1:])
        for connection in slow.values():
            connection.close()
    assert statuses == dict.fromkeys(slow, 400)


REQUESTS, AT_ONCE, ANSWER_S = 240, 8, 60.0
METHODS = ["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE", "XYZ"]
ODD = ["é", "%C3%A9", "%FF%FE", "%00", "%2F..%2F", "%ED%A0%80", "²", "١", "%D9%A1", "9" * 5000]
ODD += ["-1", "1e9", "😀", "%", ""]
ODD += ["a", "1", "none", ".", "..", "~", "%0D%0A", "\x01", "tinker://x", "K", "%25", "?", "#", "[", "9999999999"]
SOUND = [odd_request for odd_request in ODD if odd_request.isascii() and odd_request.isprintable()]
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
HEADERS = ["Authorization", "X-Api-Key", "Host", "Content-Type", "Accept", "Cookie", "Range", "X-é", "Upgrade"]
HEADERS += ["Expect", "Content-Length", "Transfer-Encoding", "Content-Encoding", "X-Forwarded-For", "Forwarded"]
HEADERS += ["Idempotency-Key", "X-Stainless-Retry-Count", "If-None-Match", "Origin"]
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
        by_name = {
            "service": (int(service.url.rpartition(":")[2]), SERVICE),
            "agents": (agents._server.port, SERVICE),  # type: ignore[attr-defined]
            "tinker": (int(tinker.url.rpartition(":")[2]), TINKER),
        }
        for name, keys in (("console", []), ("console with keys", [ServiceKey("admin", ADMIN)])):
            server = http_server(make_console_app(reader, keys), "127.0.0.1", 0)
            await server.open()
            stack.push_async_callback(server.close)
            by_name[name] = (server.port, CONSOLE)
        yield by_name


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
    for name, statuses_of_server in statuses.items():  # requests come past the parser and the guard
        assert len(statuses_of_server | {400, 401}) > 3, (name, statuses_of_server)
    return wrong


def test_no_request_makes_an_error_of_a_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(failures(tmp_path, REQUESTS)) == []
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [message for message in messages if "Event loop is closed" not in message] == []  # that of another test
