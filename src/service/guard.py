"""Guards all routes: checks who calls, how often, how large a request's body is, and how slowly it arrives.

A key is checked before a byte of the body is read, and a body is read whole before a route sees it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import error_reply
from service.keys import ServiceKey, ServiceKeys
from service.ports import ADMISSION
from service.requests import RequestRefused, count_of
from service.routes import Caller, caller_of, in_session, name_of
from trireme.config.service import ServiceConfig

if TYPE_CHECKING:
    from service.metrics import ServiceMetrics

FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""Headers by which a proxy on this machine says that the caller is on another machine."""


SESSION = "trireme.session"
KEY = "trireme.key"
"""Keys of a request's ASGI scope. Under them the guard passes the request's session ("": none) and its ServiceKey (or
None) to the routes."""
KEYED: tuple[Caller, ...] = ("client", "session", "admin")
"""Kinds of callers that need a key, also on this machine."""
ROUNDING_S = 1e-3
KEYS_AT_FIRST = 1024
"""The number of buckets at which full buckets are removed for the first time."""
MEGABYTE = 10**6
MOST_STRINGS = 100_000
"""The most strings in a large body of JSON."""
UNANNOUNCED = MEGABYTE
"""The largest body, in bytes, without an announced length. It bounds the cost of clients that send chunks without end;
clients of OpenAI, Anthropic and Tinker always announce the length."""


@dataclass(frozen=True)
class Limits:
    """The bounds of one request, and of one key's requests."""

    body_bytes: int
    """The largest body, in bytes."""
    body_s: float
    """Seconds within which the whole body must arrive."""
    per_minute: int | None
    """The most requests of one key in a minute; None: no limit."""

    @classmethod
    def of(cls, options: ServiceConfig) -> Limits:
        """Returns the limits that the section `service` of a configuration sets."""
        return cls(int(options.max_body_mb * MEGABYTE), options.body_s, options.requests_per_minute)


class Rates:
    """Limits the requests of each key to `per_minute`. Each key has a bucket that holds one minute's requests and fills
    evenly with time."""

    def __init__(self, per_minute: int | None, now: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._now = now
        self._full_at: dict[str, float] = {}
        """When the bucket of each key is full again, in seconds of `now`."""
        self._capacity = KEYS_AT_FIRST

    def take(self, name: str) -> None:
        """Counts one request of the key `name`. Raises RequestRefused if the key has no request left."""
        if self._per_minute is None:
            return
        now = self._now()
        each_s = 60 / self._per_minute
        if len(self._full_at) >= self._capacity:  # each session has a key; a full bucket says no more than none
            self._full_at = {key: at for key, at in self._full_at.items() if at > now}
            self._capacity = max(KEYS_AT_FIRST, 2 * len(self._full_at))
        full_at = max(now, self._full_at.get(name, now)) + each_s
        wait_s = full_at - now - 60
        if wait_s > ROUNDING_S:
            raise RequestRefused(
                f"more than {self._per_minute} requests in a minute with this key (service.requests_per_minute)",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )
        self._full_at[name] = full_at


class RequestGuard:
    """ASGI middleware that admits or refuses each request before the app sees it."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ServiceKeys,
        limits: Limits,
        metrics: ServiceMetrics | None,
        caller_of: Callable[[str, str], Caller] = caller_of,
    ) -> None:
        """`caller_of`: returns, for a method and a path, which callers may use the route."""
        self._app = app
        self._keys = keys
        self._limits = limits
        self._metrics = metrics
        self._caller_of = caller_of
        self._rates = Rates(limits.per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status = 500
        path = scope["path"]

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            body = await self._admit(scope, receive)
        except RequestRefused as refused:
            await error_reply(path, refused, close=True)(scope, receive, noted)
        else:
            await self._app(scope, _replayed(body, receive), noted)
        finally:
            if self._metrics:
                self._metrics.request(name_of(path), status, time.monotonic() - started)

    async def _admit(self, scope: Scope, receive: Receive) -> bytes:
        """Checks a request's key, rate and size, and returns its whole body (b"" where the route takes no body). Raises
        RequestRefused if the guard does not admit the request."""
        headers = Headers(scope=scope)
        key = self._keys.find(_key_in(headers))
        caller = self._caller_of(scope["method"], scope["path"])
        session = in_session(scope["path"])[0]
        if not _may(caller, key, session, scope, headers):
            raise _not_open(f"{scope['method']} {name_of(scope['path'])}", caller, key)
        scope[SESSION] = session or (key.session if key else "")
        scope[KEY] = key
        if caller != "all" and ADMISSION in scope:
            scope[ADMISSION].granted = True
        length = count_of(headers.get("content-length", ""))
        if caller not in KEYED:  # what is open without a key takes no body, and waits for none
            if length or "transfer-encoding" in headers:
                raise _too_large(0)
            return b""
        if key:
            self._rates.take(key.name)
        body = await self._body(length, receive)
        if len(body) > UNANNOUNCED and "json" in headers.get("content-type", ""):
            _refuse_many_strings(body)
        return body

    async def _body(self, length: int | None, receive: Receive) -> bytes:
        limit = self._limits.body_bytes
        if length is None:
            allowed = min(limit, UNANNOUNCED)
        else:
            allowed = limit
        if (length or 0) > allowed:
            raise _too_large(limit, allowed)
        parts = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise RequestRefused("the client left before its body was whole", status=400)
                    parts.append(part := message.get("body", b""))
                    size += len(part)
                    if size > allowed:
                        raise _too_large(limit, allowed)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise RequestRefused(
                f"the body took longer than {self._limits.body_s:g} s (service.body_s)", status=408, code="body_timeout"
            ) from None


def _refuse_many_strings(body: bytes) -> None:
    """Raises RequestRefused if a JSON body has more than MOST_STRINGS strings. Checks before the body is parsed,
    because parsed strings take ten times their bytes, and parsing blocks the event loop. (Counts quotes without a
    backslash before them.)"""
    if body.count(b'"') - body.count(b'\\"') > 2 * MOST_STRINGS:
        raise RequestRefused(f"a body of more than {MOST_STRINGS:,} strings", status=413, code="body_too_large")


def _not_open(route: str, caller: Caller, key: ServiceKey | None) -> RequestRefused:
    """Returns the refusal of a request that `key` may not make: status 401 if there is no key, 403 if the key opens
    only other routes."""
    if key is None:
        message = "this route needs a key; expected Authorization: Bearer KEY, or x-api-key: KEY"
        return RequestRefused(message, status=401, code="invalid_api_key")
    if caller == "session":
        keys = "an admin key, or that of this session"
    else:
        keys = "an admin key"
    message = f"{route} is not open to a key of the role {key.role}; expected {keys}"
    return RequestRefused(message, status=403, code="invalid_api_key")


def _too_large(limit: int, unannounced: int | None = None) -> RequestRefused:
    if limit:
        allowed = f"more than {limit:,} bytes (service.max_body_mb)"
    else:
        allowed = "a request that takes none"
    if unannounced is not None and unannounced < limit:
        allowed = f"more than {unannounced:,} bytes in chunks; say its length first (Content-Length)"
    return RequestRefused(f"a body of {allowed}", status=413, code="body_too_large")


def _key_in(headers: Headers) -> str | None:
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    return headers.get("x-api-key")


def _may(caller: Caller, key: ServiceKey | None, session: str, scope: Scope, headers: Headers) -> bool:
    """Returns True if a request with `key` (None: without a key) may use a route that is open to callers of the kind
    `caller`. `session`: the session in the route's path. If `caller` is "admin or loopback", a request that comes
    directly from this machine needs no key."""
    if caller == "all" or (key is not None and key.role == "admin"):
        return True
    if caller in KEYED:
        return key is not None and (caller == "client" or (caller == "session" and key.session == session))
    if any(name in headers for name in FORWARDED):
        return False
    try:
        return ip_address((scope.get("client") or ("",))[0]).is_loopback
    except ValueError:
        return False


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Returns an ASGI `receive` that first returns the `body`, which was already read, and then the later messages of
    the client, such as its disconnect."""
    delivered = False

    async def again() -> Message:
        nonlocal delivered
        if not delivered:
            delivered = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again
