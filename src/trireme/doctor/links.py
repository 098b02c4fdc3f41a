"""Connections between nodes, tried as a run will use them: who reaches whom, at which ports, at what rate.

One protocol: the caller sends a token and then bytes until it closes its half; the listener answers with their number.
A listener reads no more of a caller without the token, and never interprets what it gets.
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

CONNECT_S, AGAIN_S = 3.0, 10.0
"""Time limits for a connection, and for the answer to it: at first, and once more where that was too short. What is
blocked answers in neither, a machine that is busy in the second."""
SEND_S = 0.3
"""Seconds for which bytes are sent to measure a rate."""
MOST_BYTES = 2**28
"""The most bytes that are sent to measure a rate."""
PIECE = bytes(2**18)
BUFFERED_BYTES = 2**20
"""The most that the kernel takes before it is sent, so that a slow link holds up no more than this."""
ANSWER_S = 20.0
"""Time limit for the answer of a slow link to all that was sent."""
COUNT_BYTES = 8


@dataclass(frozen=True)
class Endpoint:
    """A place where a node can be reached."""

    host: str
    """An address of the node."""
    port: int
    """A port at that address."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Link:
    """The way from one node to an endpoint of another."""

    source: str
    """The name of the node that connects."""
    target: str
    """The name of the node that listens."""
    at: Endpoint
    """Where it listens."""
    error: str
    """Why the source does not reach it; "" if it does."""


class Listener:
    """Listens at endpoints of this node, in threads, until `close`. Answers callers that know `token`."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._sockets: list[socket.socket] = []

    def add(self, host: str, ports: Sequence[int] = ()) -> Endpoint:
        """Listens at an address of this node, at the first free one of `ports` or at any. Raises RoomFailed."""
        opened = listen(host, ports)
        self._sockets.append(opened)
        threading.Thread(target=self._accept, args=(opened,), name="doctor: accept", daemon=True).start()
        return Endpoint(host, opened.getsockname()[1])

    def close(self) -> None:
        """Ends all that listens."""
        for opened in self._sockets:
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)  # wakes up the thread that accepts
            opened.close()
        self._sockets.clear()

    def _accept(self, opened: socket.socket) -> None:
        with suppress(OSError):  # closed
            while True:
                caller, _ = opened.accept()
                threading.Thread(target=self._answer, args=(caller,), name="doctor: answer", daemon=True).start()

    def _answer(self, caller: socket.socket) -> None:
        with caller, suppress(OSError):
            caller.settimeout(ANSWER_S)
            if not hmac.compare_digest(_read(caller, len(self._token)), self._token):
                return
            count, room = 0, bytearray(len(PIECE))
            while got := caller.recv_into(room):
                count += got
            caller.sendall(count.to_bytes(COUNT_BYTES, "big"))


def reach(to: Endpoint, token: bytes) -> str:
    """Connects to a `Listener`. Returns why that does not work; "" if it does."""
    for limit_s in (CONNECT_S, AGAIN_S):
        try:
            _send(to, token, 0.0, limit_s)
        except (OSError, RoomFailed) as error:
            reason = str(error)
            if not isinstance(error, TimeoutError):
                break
        else:
            return ""
    return reason


def rate(to: Endpoint, token: bytes) -> float:
    """Returns the bytes per second that reach a `Listener`, confirmed by it; 0 if the connection fails."""
    try:
        count, seconds = _send(to, token, SEND_S, AGAIN_S)
    except (OSError, RoomFailed):
        return 0.0
    return count / seconds


def _send(to: Endpoint, token: bytes, send_s: float, connect_s: float) -> tuple[int, float]:
    """Sends for so many seconds. Returns how many bytes arrived, and the seconds until that was confirmed."""
    with socket.create_connection((to.host, to.port), connect_s) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFERED_BYTES)
        connection.sendall(token)
        started, sent = time.monotonic(), 0
        connection.settimeout(ANSWER_S)
        while time.monotonic() - started < send_s and sent < MOST_BYTES:
            connection.sendall(PIECE)
            sent += len(PIECE)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(ANSWER_S if send_s else connect_s)
        answer = _read(connection, COUNT_BYTES)
        seconds = time.monotonic() - started
    count = int.from_bytes(answer, "big")
    if len(answer) < COUNT_BYTES or count < sent:
        raise RoomFailed(f"what listens at {to} does not answer as it should")
    return count, seconds


def _read(connection: socket.socket, count: int) -> bytes:
    """Reads so many bytes; fewer if the connection ends before."""
    found = b""
    while len(found) < count and (got := connection.recv(count - len(found))):
        found += got
    return found
