"""HTTP replies that notice whether their client is still connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from service.requests import Delta, RequestRefused

VERSION = "x-trireme-version"
T = TypeVar("T")


class EventReply(StreamingResponse):
    """A reply of server-sent events. When it ends, also by an error or a disconnect, it closes `source`, the generator
    that samples for it."""

    def __init__(self, texts: AsyncIterator[str], source: AsyncGenerator[Delta, None], headers: dict[str, str]) -> None:
        super().__init__(texts, media_type="text/event-stream", headers={**headers, "cache-control": "no-cache"})
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


class DeliveredReply(Response):
    """A reply that calls `delivered` once its last byte was handed to a connection that is still open."""

    def __init__(self, reply: Response, delivered: Callable[[], None]) -> None:
        super().__init__()
        self._reply = reply
        self._delivered = delivered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnect = asyncio.ensure_future(_disconnected(receive))
        connected = True

        async def noted(message: Message) -> None:
            nonlocal connected
            is_body = message["type"] == "http.response.body"
            if is_body and message.get("body"):  # the end of a stream is empty: its client may have left, with all
                await asyncio.sleep(0)  # the watcher of the connection runs
                connected = connected and not disconnect.done()
            await send(message)
            # Now: the client may have the answer, and its session be exported, in the next moment.
            if is_body and connected and not message.get("more_body", False):
                self._delivered()

        try:
            await self._reply(scope, receive, noted)
        finally:
            disconnect.cancel()
            await asyncio.gather(disconnect, return_exceptions=True)


async def until_disconnected(request: Request, work: Coroutine[object, object, T]) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels `work`, which only this client needs, and
    raises RequestRefused (499)."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestRefused("the client left before the answer was there", status=499)
    finally:
        for awaitable in (task, disconnect):
            awaitable.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
