"""The HTTP face: a FastAPI app in front of a `Front`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from service.asked import Asked, RequestRefused, ServiceAnswer
from service.console.app import ConsoleRoutes
from service.console.reading import RunReader
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
from service.replies import VERSION, AskingBody, Dialect, EventReply, until_gone
from service.session_app import SessionRoutes, session_of
from service.sessions.door import SessionDoor

log = logging.getLogger(__name__)


class Service:
    """The routes of the service."""

    def __init__(self, front: Front, metrics: ServiceMetrics, sessions: SessionRoutes) -> None:
        self._front, self._metrics, self._began_s = front, metrics, now_s()
        self._sessions = sessions

    def routes(self, app: FastAPI, owners: bool) -> None:
        """Adds all routes to the app, with `owners` also the verbs of those who open sessions. A request is compared
        with each in turn, so that turns of sessions come first."""
        of_session = "/sessions/{session}"
        for prefix in (of_session, ""):
            app.post(f"{prefix}/v1/chat/completions")(self.chat)
            app.post(f"{prefix}/v1/completions")(self.completions)
            app.post(f"{prefix}/v1/responses")(self.responses)
            app.post(f"{prefix}/v1/messages")(self.messages)
            app.get(f"{prefix}/v1/models")(self.models)
            app.get(f"{prefix}/v1/models/{{name:path}}")(self.model)
        app.get("/health")(self.health)
        app.get("/metrics")(self.metrics)
        self._sessions.routes(app, owners)

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
        if session := session_of(request):
            reply, answers = await until_gone(request, self._sessions.reply(request, session, body, dialect))
            for answer in answers:
                self._metrics.answer(answer)
            return reply
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


def make_app(
    front: Front,
    door: SessionDoor,
    keys: ServiceKeys,
    limits: Limits,
    run: RunReader | None = None,
    owners: bool = True,
) -> FastAPI:
    """Makes the app. `run`: what the console shows to those with an admin key; None: there is no console. `owners`:
    sessions are opened, rewarded and exported over HTTP. There are no other pages for people: FastAPI's would load code
    from elsewhere."""
    metrics = ServiceMetrics(front.places)
    app = FastAPI(title="Trireme", docs_url=None, redoc_url=None)
    Service(front, metrics, SessionRoutes(door, front.tokenizer)).routes(app, owners)
    if run is not None:
        ConsoleRoutes(run).routes(app)

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
