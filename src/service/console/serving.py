"""Serves the console of a run alone, for `trireme watch --web`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service import ports
from service.asked import RequestRefused
from service.console.app import PATH, ConsoleRoutes, add_refusals
from service.console.reading import RunReader
from service.errors import error_reply
from service.guard import Limits, RequestGuard
from service.keys import ServiceKey, ServiceKeys, new_key, read
from service.routes import Caller, caller_of
from trireme.core.refusals import Refusal

LIMITS = Limits(body_bytes=0, body_s=5.0, per_minute=None)


def is_loopback(host: str) -> bool:
    """Returns True for a name or an address with which only this machine is reached."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class OwnHostAlone:
    """Middleware (ASGI) that refuses requests which name another host: those of a page elsewhere, whose name was made
    to lead to this machine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("host", "")
            name = given[: given.find("]") + 1] if given.startswith("[") else given.partition(":")[0]
            if not is_loopback(name):
                refused = RequestRefused(
                    f"given: the host {name!r}; expected: localhost or 127.0.0.1; to do: open the address that "
                    "`trireme watch --web` printed, or give it --keys",
                    status=403,
                )
                await error_reply(scope["path"], refused, close=True)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_console_app(reader: RunReader, keys: list[ServiceKey]) -> FastAPI:
    """Makes the app. Without `keys` it answers this machine alone."""
    app = FastAPI(title="Trireme console", docs_url=None, redoc_url=None, openapi_url=None)
    ConsoleRoutes(reader).routes(app)
    add_refusals(app)

    def caller(method: str, path: str) -> Caller:
        known = caller_of(method, path)
        return "admin or loopback" if known == "admin" and not keys else known

    app.add_middleware(RequestGuard, keys=ServiceKeys(keys), limits=LIMITS, metrics=None, caller_of=caller)
    if not keys:
        app.add_middleware(OwnHostAlone)
    return app


def console_keys(host: str, file: Path | None) -> list[ServiceKey]:
    """Returns the keys that open the console at `host`: those of a file, else a new one where others reach the host,
    and none where only this machine does. Raises BadInput."""
    if file is None:
        return [] if is_loopback(host) else [new_key("admin")]
    keys = read(file)
    if not any(key.role == "admin" for key in keys):
        raise Refusal(
            f"--keys {file}, which has no admin key",
            "a line `admin KEY`: logs and sessions are not for clients",
            "add one",
        ).error()
    return keys


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens. Raises BadInput if the address is not of this machine, or the port is taken."""
    try:
        return ports.listen(host, port)
    except OSError as error:
        raise Refusal(
            f"--host {host} --port {port}: {error}",
            "an address of this machine, and a port that is free",
            "give another --port, or 0 for any that is free",
        ).error() from None


def address_of(listening: socket.socket, host: str, keys: list[ServiceKey]) -> str:
    """Returns what to open in a browser. A key stands behind `#`, which browsers do not send."""
    shown = f"[{host}]" if ":" in host else host
    key = next((f"#key={each.value}" for each in keys if each.role == "admin"), "")
    return f"http://{shown}:{listening.getsockname()[1]}{PATH}/{key}"


def serve_console(reader: RunReader, host: str, port: int, key_file: Path | None, say: Callable[[str], None]) -> None:
    """Serves until a signal comes. Raises BadInput."""
    keys = console_keys(host, key_file)
    listening = listen(host, port)
    say(f"{reader.root}: {address_of(listening, host, keys)}")
    say("open it in a browser; Ctrl-C ends this, and the run does not notice")
    asyncio.run(serve(ports.HttpServer(make_console_app(reader, keys), listening)))


async def serve(server: ports.HttpServer) -> None:
    """Serves until it is told to end, or the event loop ends."""
    await server.open()
    try:
        await server.serving
    finally:
        await server.close()
