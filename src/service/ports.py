"""The server behind every port of the project, with limits that hold before a key is known.

    connection --head--> app: RequestGuard --body--> routes

A request reaches the guard (`service.guard`), which looks for its key, once its head is complete. This module bounds
the cost of a connection before that: bytes of the head, the seconds in which it must come, and the number of
connections that have not shown a key.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from trireme.core.errors import RoomFailed

HEAD_BYTES = 32 * 1024
"""The most bytes of a request's first line and headers, and the most bytes between two pieces of its body."""
HEAD_S = 10.0
"""Seconds within which the head of a request must arrive. They count from its first byte; on a new connection, from the
opening of the connection."""
PENDING_CONNECTIONS = 256
"""The most connections that have not shown a key. A further connection closes the oldest of them, because clients send
their key at once."""
ACCEPTED_AT_ONCE = 64
"""Connections that asyncio accepts before it does other work."""
QUEUE = 2048
"""Connections that the system keeps until they are accepted."""
TICKS = 10
"""The server's ticks in a second."""
IDLE_S = 5
CLOSE_S = 3.0
ADMISSION = "trireme.admission"
"""The key under which the scope of a request holds the Admission of its connection."""


@dataclass(slots=True)
class Admission:
    """Records whether the service trusts a connection. `service.guard.RequestGuard` sets `granted` when it admits a
    request that has a valid key, or a request from the server's own machine to a route that local clients may call
    without a key. Requests to routes that are open to everyone do not set it."""

    granted: bool = False


class PortState(ServerState):
    """The open connections of a port, with a list of the connections that have not shown a key yet."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: dict[BoundedHttp, None] = {}
        """The connections that had not shown a key when `add` last checked them, the oldest first."""

    def add(self, connection: BoundedHttp) -> None:
        """Adds a new connection. If PENDING_CONNECTIONS connections have not shown a key yet, first closes the oldest
        of them."""
        while len(self.pending) >= PENDING_CONNECTIONS:
            oldest = next(iter(self.pending))
            del self.pending[oldest]
            if not oldest.admission.granted:
                oldest.transport.abort()
        self.pending[connection] = None


class BoundedHttp(HttpToolsProtocol):
    """An HTTP connection that limits the size of each request's head, and the time until the head is complete."""

    server_state: PortState

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.admission = Admission()
        self._unread = 0
        """Bytes since the last piece of body, or the last complete head."""
        self._since_s = self.loop.time()
        """When the first of these bytes came, in seconds of the event loop's clock."""
        self.server_state.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.pending.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            if not self._unread:
                self._since_s = self.loop.time()
            piece = data[: HEAD_BYTES - self._unread]
            data = data[len(piece) :]
            self._unread += len(piece)
            super().data_received(piece)  # a callback below sets the count back
            if self._unread >= HEAD_BYTES:
                self._end(f"a request with {HEAD_BYTES:,} bytes before its body; send shorter headers")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[ADMISSION] = self.admission  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        self._unread = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()

    def expire(self, now_s: float) -> None:
        """Closes the connection if the head of a request was not complete within HEAD_S seconds."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and (self._unread or self.cycle is None) and now_s - self._since_s > HEAD_S:
            self._end(f"a request whose headers took longer than {HEAD_S:g} s; send it whole")

    def _end(self, message: str) -> None:
        """Closes the connection; before that, replies with status 400 and `message` unless another reply has begun."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.send_400_response(message)
        self.transport.close()


class HttpServer(Server):
    """Serves one app at one address, in the running event loop."""

    def __init__(self, app: ASGIApp, listening: socket.socket, idle_s: int = IDLE_S) -> None:
        """`listening`: the socket, which the server closes when it ends. `idle_s`: seconds for which a connection may
        wait for its next request."""
        quiet: dict[str, Any] = {
            "log_config": None,
            "log_level": "error",
            "access_log": False,
        }  # else clients fill logs
        super().__init__(
            Config(
                app,
                http=BoundedHttp,
                ws="none",
                lifespan="off",
                timeout_keep_alive=idle_s,
                backlog=ACCEPTED_AT_ONCE,
                **quiet,
            )
        )
        self._listening = listening
        self.port = listening.getsockname()[1]
        self.server_state: PortState = PortState()

    def address_at(self, host: str) -> str:
        """Returns the URL of this server for clients that know this machine as `host`."""
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def open(self) -> None:
        """Starts the app and begins to answer requests."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup([self._listening])
        self._listening.listen(QUEUE)
        self.serving = asyncio.create_task(self.main_loop())

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS == 0:
            now_s = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                connection.expire(now_s)  # type: ignore[union-attr]
        return await super().on_tick(counter)

    async def close(self) -> None:
        """Closes the port. Connections with unfinished answers have CLOSE_S seconds to end, and are then closed too."""
        self.should_exit = True
        await asyncio.wait({self.serving}, timeout=CLOSE_S)
        ending = asyncio.create_task(self.shutdown([self._listening]))
        await asyncio.wait({ending}, timeout=CLOSE_S)
        self.force_exit = True
        await asyncio.wait({ending}, timeout=CLOSE_S)


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at `host` and `port` (0: any free port). Raises OSError if this machine does not
    have the address, or the port is taken."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=QUEUE)


def http_server(app: ASGIApp, host: str, port: int, idle_s: int = IDLE_S) -> HttpServer:
    """Returns a server for `app` with a socket at `host` and `port` (0: any free port). The server answers once its
    `open` has been called. Raises RoomFailed if the address cannot be used."""
    try:
        return HttpServer(app, listen(host, port), idle_s)
    except OSError as error:
        raise RoomFailed(
            f"the server cannot listen at {host}:{port}: {error}; choose an address of this machine as the host, and a "
            "port that is free, or 0"
        ) from None
