"""The HTTP face: a FastAPI app in front of a `Front`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from service.asked import Asked, RequestRefused, ServiceAnswer
from service.dialects import chat, completions, messages, responses
from service.dialects.chat import ChatRequest
from service.dialects.completions import CompletionRequest
from service.dialects.messages import MessagesRequest
from service.dialects.responses import ResponseRequest
from service.dialects.wire import Used, now_s, refusal_of
from service.errors import JsonReply, error_reply, stream_error
from service.front import Event, Front
from service.guard import Limits, RequestGuard
from service.keys import ServiceKeys
from service.metrics import ServiceMetrics

VERSION = "x-trireme-version"
T = TypeVar("T")
log = logging.getLogger(__name__)


class AskingBody(Protocol):
    """A body that asks for answers."""

    def asked(self) -> Asked:
        """Returns what it asks for."""


class Dialect(Protocol):
    """A module of `service.dialects`."""

    def whole(self, body: Any, answers: Sequence[ServiceAnswer], tokenizer: Any) -> dict[str, Any]: ...

    def stream(self, body: Any, events: AsyncIterator[Event], tokenizer: Any) -> AsyncIterator[str]: ...


class EventReply(StreamingResponse):
    """Server-sent events. However it ends, what is still sampled for it is ended."""

    def __init__(self, texts: AsyncIterator[str], source: AsyncGenerator[Event, None], headers: dict[str, str]) -> None:
        super().__init__(texts, media_type="text/event-stream", headers={**headers, "cache-control": "no-cache"})
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


class Service:
    """The routes of the service."""

    def __init__(self, front: Front, metrics: ServiceMetrics) -> None:
        self._front, self._metrics, self._began_s = front, metrics, now_s()

    def routes(self, app: FastAPI) -> None:
        """Adds all routes to the app."""
        app.get("/health")(self.health)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/v1/completions")(self.completions)
        app.post("/v1/responses")(self.responses)
        app.post("/v1/messages")(self.messages)
        app.get("/metrics")(self.metrics)

    async def health(self) -> JsonReply:
        """Tells that the service answers."""
        return JsonReply({"status": "ok"})

    async def metrics(self) -> Response:
        """Tells the numbers of the service."""
        return PlainTextResponse(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> JsonReply:
        """Lists the models that are there."""
        return JsonReply({"object": "list", "data": [self._model(name) for name in self._front.models.names]})

    async def model(self, name: str) -> JsonReply:
        """Describes one model."""
        self._front.models.check(name)
        return JsonReply(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._began_s,
            "owned_by": "trireme",
            "max_model_len": self._front.models.max_len,
        }

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Continues a conversation, in OpenAI's dialect."""
        return await self._answer(request, body, chat)

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """Continues texts or token ids, in OpenAI's dialect."""
        return await self._answer(request, body, completions)

    async def responses(self, request: Request, body: ResponseRequest) -> Response:
        """Continues a conversation, in the dialect of OpenAI's responses."""
        return await self._answer(request, body, responses)

    async def messages(self, request: Request, body: MessagesRequest) -> Response:
        """Continues a conversation, in Anthropic's dialect."""
        return await self._answer(request, body, messages)

    async def _answer(self, request: Request, body: AskingBody, dialect: Dialect) -> Response:
        asked, tokenizer = body.asked(), self._front.tokenizer
        if not asked.stream:
            answers = await until_gone(request, self._front.answers(asked))
            for answer in answers:
                self._metrics.answer(answer)
            version = Used.of(answers, asked.n).version
            return JsonReply(dialect.whole(body, answers, tokenizer), headers={VERSION: str(version)})
        events = self._counted(asked)
        first = await until_gone(request, anext(events))  # what fails before it has a status of its own
        version = first.versions[0] if isinstance(first, ServiceAnswer) else first.version
        texts = dialect.stream(body, _behind(first, events), tokenizer)
        return EventReply(_to_the_end(texts, request.url.path), events, {VERSION: str(version)})

    async def _counted(self, asked: Asked) -> AsyncGenerator[Event, None]:
        events = self._front.events(asked)
        try:
            async for each in events:
                if isinstance(each, ServiceAnswer):
                    self._metrics.answer(each)
                yield each
        finally:
            await events.aclose()


def make_app(front: Front, keys: ServiceKeys, limits: Limits) -> FastAPI:
    """Makes the app. There are no pages for people: they would load code from elsewhere."""
    metrics = ServiceMetrics(front.places)
    app = FastAPI(title="Trireme", docs_url=None, redoc_url=None)
    Service(front, metrics).routes(app)

    async def refused(request: Request, error: Exception) -> Response:
        return error_reply(request.url.path, as_refused(error))

    for kind in (RequestRefused, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
    app.add_middleware(RequestGuard, keys=keys, limits=limits, metrics=metrics)
    return app


def as_refused(error: Exception) -> RequestRefused:
    """Returns the answer to an error of any kind."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, RequestValidationError):
        return refusal_of(error.errors())
    if isinstance(error, HTTPException):
        return RequestRefused(str(error.detail), status=error.status_code)
    return RequestRefused("an error of the service, which its log tells", status=500)


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, which ends when the client leaves: it is sampled for no other reason."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestRefused("the client left before the answer was there", status=499)
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _behind(first: Event, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    yield first
    async for each in events:
        yield each


async def _to_the_end(texts: AsyncIterator[str], path: str) -> AsyncIterator[str]:
    """Yields all events of a stream. The last one is an error where it cannot be continued."""
    try:
        async for text in texts:
            yield text
    except Exception as error:
        if not isinstance(error, RequestRefused):
            log.exception("a stream failed")
        yield stream_error(path, as_refused(error))
