"""The HTTP face: a FastAPI app in front of a `Front`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from service.asked import Delta, RequestRefused, ServiceAnswer, ServiceRequest
from service.console.app import ConsoleRoutes
from service.console.reading import RunReader
from service.dialects import chat, completions, messages, responses
from service.dialects.chat import ChatRequest
from service.dialects.completions import CompletionRequest
from service.dialects.messages import MessagesRequest
from service.dialects.responses import ResponseRequest
from service.dialects.wire import now_s, refusal_of
from service.errors import JsonReply, error_reply, stream_error
from service.front import RETRY_AFTER_S, Front
from service.guard import Limits, RequestGuard
from service.keys import ServiceKeys
from service.metrics import ServiceMetrics
from service.replies import VERSION, AskingBody, DeliveredReply, Dialect, EventReply, until_gone
from service.session_app import SessionRoutes, session_of
from trireme.core.errors import BadInput, StorageFailed, TriremeError

RETRIES = "x-stainless-retry-count"
"""OpenAI's and Anthropic's clients say with it how often they have asked before."""
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
        return JsonReply({"object": "list", "data": [self._model(name) for name in self._front.turns.models.names]})

    async def model(self, name: str) -> JsonReply:
        """Describes one model."""
        self._front.turns.models.check(name)
        return JsonReply(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._began_s,
            "owned_by": "trireme",
            "max_model_len": self._front.turns.models.max_len,
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
        session, tokenizer = session_of(request), self._front.turns.tokenizer
        retry = request.headers.get(RETRIES, "0").strip() not in ("", "0")
        answers: list[ServiceAnswer] = []
        service_request = body.service_request()
        pieces = self._pieces(service_request, session, retry, answers)
        reply: Response
        if service_request.stream:
            first = await until_gone(request, anext(pieces))  # what fails before it has a status of its own
            texts = dialect.stream(body, _behind(first, pieces), tokenizer)
            texts = _to_the_end(texts, request.url.path, answers)
            reply = EventReply(texts, pieces, {VERSION: str(first.version)})
        else:
            await until_gone(request, _all_of(pieces))
            answers.sort(key=lambda answer: answer.choice)
            version = max(answer.versions[1] for answer in answers)
            reply = JsonReply(dialect.whole(body, answers, tokenizer), headers={VERSION: str(version)})
        return DeliveredReply(reply, lambda: self._front.delivered(session, answers)) if session else reply

    async def _pieces(
        self, request: ServiceRequest, session: str, retry: bool, answers: list[ServiceAnswer]
    ) -> AsyncGenerator[Delta, None]:
        """Yields the pieces of all answers, and adds each whole one to `answers`."""
        async with aclosing(self._front.pieces(request, session, retry)) as pieces:
            async for piece in pieces:
                if piece.answer:
                    self._metrics.answer(piece.answer)
                    answers.append(piece.answer)
                yield piece


def make_app(
    front: Front,
    keys: ServiceKeys,
    limits: Limits,
    run: RunReader | None = None,
    owners: bool = True,
) -> FastAPI:
    """Makes the app. `run`: what the console shows to those with an admin key; None: there is no console. `owners`:
    sessions are opened, rewarded and exported over HTTP. There are no other pages for people: FastAPI's would load code
    from elsewhere."""
    metrics = ServiceMetrics(front.turns.places)
    app = FastAPI(title="Trireme", docs_url=None, redoc_url=None)
    Service(front, metrics, SessionRoutes(front)).routes(app, owners)
    if run is not None:
        ConsoleRoutes(run).routes(app)

    async def refused(request: Request, error: Exception) -> Response:
        return error_reply(request.url.path, as_refused(error))

    for kind in (RequestRefused, TriremeError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
    app.add_middleware(RequestGuard, keys=keys, limits=limits, metrics=metrics)
    return app


def as_refused(error: Exception) -> RequestRefused:
    """Returns the answer to an error of any kind."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, BadInput):
        return RequestRefused(str(error))
    if isinstance(error, TriremeError):
        code = "storage_failed" if isinstance(error, StorageFailed) else "replicas_failed"
        return RequestRefused(str(error), status=503, code=code, retry_after_s=RETRY_AFTER_S)
    if isinstance(error, RequestValidationError):
        return refusal_of(error.errors())
    if isinstance(error, HTTPException):
        return RequestRefused(str(error.detail), status=error.status_code)
    return RequestRefused("an error of the service, which its log tells", status=500)


async def _behind(first: Delta, pieces: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    yield first
    async for piece in pieces:
        yield piece


async def _all_of(pieces: AsyncIterator[Delta]) -> None:
    async for _ in pieces:
        pass


async def _to_the_end(texts: AsyncIterator[str], path: str, answers: list[ServiceAnswer]) -> AsyncIterator[str]:
    """Yields all events of a stream. The last one is an error where it cannot be continued; its client then counts as
    one that has none of the `answers`."""
    try:
        async for text in texts:
            yield text
    except Exception as error:
        answers.clear()
        refused = as_refused(error)
        if refused.status == 500:
            log.exception("a stream failed")
        yield stream_error(path, refused)
