"""Tests connections between nodes as a run will use them: which node reaches which, at which ports, at what rate.

One protocol: the caller sends a token and then bytes until it closes its half of the connection; the listener answers
with the number of these bytes. A listener stops reading from a caller without the token, and never interprets the
bytes.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from trireme.core.errors import RoomFailed
from trireme.process.interfaces import listen

CONNECT_S = 10.0
"""Time limit for a connection and its answer, long enough for a busy machine."""
SEND_S = 0.3
"""Seconds for which bytes are sent to measure a rate."""
CHUNK = bytes(2**18)
SEND_BUFFER_BYTES = 2**20
"""Bytes that the kernel buffers at most before it sends, which bounds the delay by a slow link."""
ANSWER_S = 20.0
"""Time limit for the answer of a slow link."""
COUNT_BYTES = 8


@dataclass(frozen=True)
class Endpoint:
    """An address and a port where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Link:
    """The result of connecting from the node `source` to an endpoint of the node `target`."""

    source: str
    target: str
    at: Endpoint
    error: str
    """Why the source does not reach it; "" if it does."""


class Listener:
    """Listens at endpoints of this node, in threads. Answers only callers that send `token`."""

    def __init__(self, token: bytes) -> None:
        self._token = token

    def add(self, host: str, ports: Sequence[int] = ()) -> Endpoint:
        """Starts to listen at `host`, an address of this node: at the first free port of `ports`, or at any free port
        if `ports` is empty. Returns the endpoint. Raises RoomFailed."""
        server = listen(host, ports)
        threading.Thread(target=self._accept, args=(server,), name="doctor: accept", daemon=True).start()
        return Endpoint(host, server.getsockname()[1])

    def _accept(self, server: socket.socket) -> None:
        while True:
            caller, _ = server.accept()
            threading.Thread(target=self._answer, args=(caller,), name="doctor: answer", daemon=True).start()

    def _answer(self, caller: socket.socket) -> None:
        with caller, suppress(OSError):
            caller.settimeout(ANSWER_S)
            if not hmac.compare_digest(_read(caller, len(self._token)), self._token):
                return
            total = 0
            buffer = bytearray(len(CHUNK))
            while count := caller.recv_into(buffer):
                total += count
            caller.sendall(total.to_bytes(COUNT_BYTES, "big"))


def reach(to: Endpoint, token: bytes) -> str:
    """Connects to the `Listener` at `to`. Returns the error as text, or "" if the listener answered."""
    try:
        _send(to, token, 0.0, CONNECT_S)
    except (OSError, RoomFailed) as error:
        return str(error)
    return ""


def rate(to: Endpoint, token: bytes) -> float:
    """Returns how many bytes per second reach the `Listener` at `to`, as the listener confirms; 0 if the connection
    fails."""
    started = time.monotonic()
    try:
        count = _send(to, token, SEND_S, ANSWER_S)
    except (OSError, RoomFailed):
        return 0.0
    return count / (time.monotonic() - started)


def _send(to: Endpoint, token: bytes, send_s: float, limit_s: float) -> int:
    """Sends bytes to the `Listener` at `to` for `send_s` seconds, and waits until the listener confirms them. Returns
    the number of bytes sent. `limit_s`: time limit in seconds for each socket operation. Raises OSError. Raises
    RoomFailed if the listener's answer is wrong."""
    sent = 0
    with socket.create_connection((to.host, to.port), limit_s) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.sendall(token)
        deadline = time.monotonic() + send_s
        while time.monotonic() < deadline:
            connection.sendall(CHUNK)
            sent += len(CHUNK)
        connection.shutdown(socket.SHUT_WR)
        answer = _read(connection, COUNT_BYTES)
    if len(answer) < COUNT_BYTES or int.from_bytes(answer, "big") < sent:
        raise RoomFailed(f"another program than this project's listens at {to}")
    return sent


def _read(connection: socket.socket, count: int) -> bytes:
    """Reads `count` bytes from `connection`. Returns fewer if the other side closes the connection first."""
    data = b""
    while len(data) < count and (chunk := connection.recv(count - len(data))):
        data += chunk
    return data
