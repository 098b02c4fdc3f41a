"""What a client without a key can cost a server: little. It is in a process of its own, where that is measured."""

import socket
import time
from collections.abc import Iterator
from select import select

import pytest
from ports_support import Cost, Watched, flood, read_to_the_end, response_status, status_of, watched_server
from tinker_support import KEY

from service.ports import HEAD_BYTES, HEAD_LINES, PENDING_CONNECTIONS

MOST = Cost(megabytes=32.0, blocked_s=0.1)
HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n"
TOO_MANY = 160 * 10**6
HALF_OPEN = 3000
LATE_S, DEADLINE_S = 5.0, 30.0
HEAD_S = 3.0


@pytest.fixture(scope="module")
def server() -> Iterator[Watched]:
    with watched_server() as server:
        for _ in range(3):  # what is imported and kept at the first requests is no cost of later ones
            assert status_of(asked(server, HEALTH + b"Connection: close\r\n\r\n")) == 401
        yield server


def asked(server: Watched, request: bytes) -> bytes:
    with server.connect() as connection:
        connection.sendall(request)
        return read_to_the_end(connection)


def check_cost(server: Watched) -> None:
    cost = server.cost()
    assert cost.megabytes < MOST.megabytes, cost
    assert cost.blocked_s < MOST.blocked_s, cost


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


@pytest.mark.parametrize(("more", "status"), [(0, 401), (1, 431)])
def test_a_head_may_have_as_many_bytes_as_are_allowed(server: Watched, more: int, status: int) -> None:
    start, end = HEALTH + b"a-header: ", b"\r\n\r\n"
    assert status_of(asked(server, start + b"x" * (HEAD_BYTES - len(start + end) + more) + end)) == status


@pytest.mark.parametrize(("more", "status"), [(0, 401), (1, 431)])
def test_a_head_may_have_as_many_lines_as_are_allowed(server: Watched, more: int, status: int) -> None:
    assert status_of(asked(server, HEALTH + b"a: b\r\n" * (HEAD_LINES - 1 + more) + b"\r\n")) == status


def test_connections_without_a_key_give_way_to_new_ones(server: Watched) -> None:
    """Also while thousands hold a large part of a head, a client with a key is served."""
    known = server.connect()
    request = HEALTH + f"X-API-Key: {KEY}\r\n\r\n".encode()
    known.sendall(request)
    assert response_status(known) == 200
    server.cost()
    half_open: list[socket.socket] = []
    try:
        for number in range(HALF_OPEN):
            half_open.append(server.connect())
            half_open[-1].sendall(HEALTH + b"a-header: " + b"x" * (HEAD_BYTES // 2))
            if number % 500 == 0:
                began = time.monotonic()
                assert status_of(asked(server, request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))) == 200
                assert time.monotonic() - began < LATE_S
        known.sendall(request)
        assert response_status(known) == 200
        half_open[0].settimeout(LATE_S)
        assert read_to_the_end(half_open[0]) == b"", "the oldest is closed"
        ends = time.monotonic() + DEADLINE_S
        while (number := still_open(half_open)) > PENDING_CONNECTIONS:
            assert time.monotonic() < ends, f"{number} connections are open"
            time.sleep(0.1)
    finally:
        for connection in [*half_open, known]:
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
        assert statuses_of_slow_clients(server) == {b"": 408, b"GET /": 408, b"\r\n": 408}


def statuses_of_slow_clients(server: Watched) -> dict[bytes, int]:
    """Returns the status that each client gets, by the letters that it sends at first."""
    began = time.monotonic()
    slow = {start: server.connect() for start in (b"", b"GET /", b"\r\n")}
    statuses: dict[bytes, int] = {}
    for start, connection in slow.items():
        connection.sendall(start)
    while len(statuses) < len(slow) and time.monotonic() - began < HEAD_S + DEADLINE_S:
        for start in slow.keys() - statuses.keys():
            if select([slow[start]], [], [], 0.2)[0]:
                assert time.monotonic() - began > HEAD_S - 1
                statuses[start] = response_status(slow[start])
            else:
                slow[start].sendall(start[-1:])
    for connection in slow.values():
        connection.close()
    return statuses


def test_strings_that_end_an_answer_are_few(server: Watched) -> None:
    """Else a replica looks for all of them after each token."""
    server.cost()
    stops = ",".join(f'"{number:06}"' for number in range(500_000))
    assert status_of(sampled(server, f"[{stops}]")) == 413
    check_cost(server)
    for few in ('["a"]', "[" + ",".join(['"a"'] * 64) + "]"):
        assert status_of(sampled(server, few)) == 404, "the session is not there"
    assert status_of(sampled(server, "[" + ",".join(['"a"'] * 65) + "]")) == 400
    assert status_of(sampled(server, "[" + ",".join(["1"] * 500_000) + "]")) == 400
    check_cost(server)


def sampled(server: Watched, stop: str) -> bytes:
    params = f'{{"stop": {stop}}}'
    body = f'{{"sampling_session_id": "s", "seq_id": 1, "prompt": {{"chunks": []}}, "sampling_params": {params}}}'
    lines = ["POST /api/v1/asample HTTP/1.1", "Host: x", "Connection: close", f"X-API-Key: {KEY}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", body]
    return asked(server, "\r\n".join(lines).encode())
