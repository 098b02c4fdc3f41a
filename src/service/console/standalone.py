"""Serves the console of a run alone, for `trireme watch --web`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import URL
from starlette.middleware.base import RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response

from service.console.app import HEADERS, add_console
from service.console.run_reader import RunReader
from service.errors import add_refusals, error_reply
from service.guard import Limits, RequestGuard
from service.keys import ServiceKey, ServiceKeys, new_key, read
from service.ports import HttpServer, http_server
from service.requests import RequestRefused
from service.routes import CONSOLE, Caller, caller_of
from trireme.core.refusals import Refusal

LIMITS = Limits(body_bytes=0, body_s=5.0, per_minute=None)


def is_loopback(host: str) -> bool:
    """Returns True if `host` is a name or an address by which only this machine can be reached."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def make_console_app(reader: RunReader, keys: list[ServiceKey]) -> FastAPI:
    """Makes the app of the console. Without `keys`, the app answers only requests that come from this machine and whose
    `Host` header is localhost or a loopback address."""
    app = FastAPI(title="Trireme console", docs_url=None, redoc_url=None, openapi_url=None)
    add_console(app, reader)
    add_refusals(app, HEADERS)

    @app.middleware("http")
    async def first(request: Request, other: RequestResponseEndpoint) -> Response:
        host = URL(f"//{request.headers.get('host', '')}").hostname or ""
        if not keys and not is_loopback(host):  # a page elsewhere, whose name was made to lead here
            refused = RequestRefused(
                f"given: the host {host!r}; expected: localhost or 127.0.0.1; to do: open the address that "
                "`trireme watch --web` printed, or give it --keys",
                status=403,
            )
            return error_reply(request.url.path, refused, close=True)
        return await other(request)

    def caller(method: str, path: str) -> Caller:
        role = caller_of(method, path)
        if role == "admin" and not keys:
            return "admin or loopback"
        return role

    app.add_middleware(RequestGuard, keys=ServiceKeys(keys), limits=LIMITS, metrics=None, caller_of=caller)
    return app


def console_keys(host: str, file: Path | None) -> list[ServiceKey]:
    """Returns the keys that open the console at `host`: the keys in `file`, which must include an admin key. Without
    `file`, returns no key if `host` is loopback, else one new admin key. Raises BadInput if the file cannot be used."""
    if file is None:
        if is_loopback(host):
            return []
        return [new_key("admin")]
    keys = read(file)
    if not any(key.role == "admin" for key in keys):
        raise Refusal(
            f"--keys {file}, which has no admin key",
            "a line `admin KEY`: client keys do not open logs and sessions",
            "add such a line",
        )
    return keys


def address_of(server: HttpServer, host: str, keys: list[ServiceKey]) -> str:
    """Returns the URL to open in a browser. The first admin key, if there is one, comes after `#`: a browser does not
    send this part of a URL."""
    key = next((f"#key={service_key.value}" for service_key in keys if service_key.role == "admin"), "")
    return f"{server.address_at(host)}{CONSOLE}/{key}"


def serve_console(reader: RunReader, host: str, port: int, key_file: Path | None, say: Callable[[str], None]) -> None:
    """Serves the console of the run that `reader` reads, until a signal comes. `key_file`: a file of keys (None: a new
    key, or no key on loopback). `say` gets messages for the user, such as the URL. Raises BadInput if the keys cannot
    be used, and RoomFailed if the address cannot be used."""
    keys = console_keys(host, key_file)
    server = http_server(make_console_app(reader, keys), host, port)
    say(f"{reader.root}: {address_of(server, host, keys)}")
    say("open it in a browser; Ctrl-C ends this, and the run does not notice")
    asyncio.run(serve(server))


async def serve(server: HttpServer) -> None:
    """Opens the server and serves until it ends or this call is cancelled, then closes it."""
    await server.open()
    try:
        await server.serving
    finally:
        await server.close()
