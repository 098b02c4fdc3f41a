"""The HTTP side of the service: a FastAPI app in front of a `Gateway`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from service.console.app import add_console
from service.console.run_reader import RunReader
from service.dialects.chat import ChatRequest
from service.dialects.completions import CompletionRequest
from service.dialects.messages import MessagesRequest
from service.dialects.responses import ResponseRequest
from service.dialects.wire import SampledBody, now_s
from service.errors import JsonReply, add_refusals, as_refused, stream_error
from service.gateway import Gateway
from service.guard import SESSION, Limits, RequestGuard
from service.keys import ServiceKeys
from service.metrics import ServiceMetrics
from service.replies import VERSION, DeliveredReply, EventReply, until_disconnected
from service.requests import Delta, ServiceAnswer
from service.routes import ROUTES, add_routes
from service.session_app import SessionRoutes

RETRIES = "x-stainless-retry-count"
"""The header in which OpenAI's and Anthropic's clients say how often they have already sent the same request."""
log = logging.getLogger(__name__)


class Service(SessionRoutes):
    """The functions behind the routes of the service, one for each route."""

    def __init__(self, gateway: Gateway, metrics: ServiceMetrics) -> None:
        super().__init__(gateway)
        self._metrics = metrics
        self._began_s = now_s()

    async def health(self) -> JsonReply:
        """Reports that the service answers."""
        return JsonReply({"status": "ok"})

    async def metrics(self) -> Response:
        """Returns the metrics of the service, for Prometheus."""
        return PlainTextResponse(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> JsonReply:
        """Lists the names of the served model."""
        return JsonReply({"object": "list", "data": [self._model(name) for name in self._gateway.turns.models.names]})

    async def model(self, name: str) -> JsonReply:
        """Describes the model `name`."""
        self._gateway.turns.models.check(name)
        return JsonReply(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._began_s,
            "owned_by": "trireme",
            "max_model_len": self._gateway.turns.models.max_len,
        }

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Continues a conversation, in OpenAI's dialect."""
        return await self._answer(request, body)

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """Continues texts or token ids, in OpenAI's dialect."""
        return await self._answer(request, body)

    async def responses(self, request: Request, body: ResponseRequest) -> Response:
        """Continues a conversation, in the dialect of OpenAI's Responses API."""
        return await self._answer(request, body)

    async def messages(self, request: Request, body: MessagesRequest) -> Response:
        """Continues a conversation, in Anthropic's dialect."""
        return await self._answer(request, body)

    async def _answer(self, request: Request, body: SampledBody) -> Response:
        session = request.scope[SESSION]
        tokenizer = self._gateway.turns.tokenizer
        self._gateway.turns.models.check(body.model)
        retry = request.headers.get(RETRIES, "0").strip() not in ("", "0")
        turns = [replace(turn, retry=True) if retry else turn for turn in body.turns()]
        answers: list[ServiceAnswer] = []

        def on_answer(answer: ServiceAnswer) -> None:
            self._metrics.answer(answer)
            answers.append(answer)

        pieces = self._gateway.pieces(turns, bool(body.stream), session, on_answer)
        reply: Response
        if body.stream:
            first = await until_disconnected(request, anext(pieces))  # what fails before it has a status of its own
            texts = _to_the_end(body.events(_behind(first, pieces), tokenizer), request.url.path, answers)
            reply = EventReply(texts, pieces, {VERSION: str(first.version)})
        else:
            await until_disconnected(request, _all_of(pieces))
            answers.sort(key=lambda answer: answer.choice)
            version = max(answer.versions[1] for answer in answers)
            reply = JsonReply(body.whole(answers, tokenizer), headers={VERSION: str(version)})
        if session:
            return DeliveredReply(reply, lambda: self._gateway.delivered(session, answers))
        return reply


def make_app(
    gateway: Gateway,
    keys: ServiceKeys,
    limits: Limits,
    run: RunReader | None = None,
    owners: bool = True,
) -> FastAPI:
    """Makes the FastAPI app of the service. `run`: the run that the console shows to holders of an admin key; None:
    there is no console. `owners`: True if the app has the routes that need an admin key, such as the routes that open,
    reward and export sessions. FastAPI's pages of documentation are off, because they load code from other servers."""
    metrics = ServiceMetrics(gateway.turns.places)
    app = FastAPI(title="Trireme", docs_url=None, redoc_url=None)
    routes = (route for route in reversed(ROUTES) if owners or route.caller != "admin")
    # Turns of sessions come first, because a request is compared with the routes in this order.
    add_routes(app, routes, Service(gateway, metrics))
    if run is not None:
        add_console(app, run)
    add_refusals(app, {})
    app.add_middleware(RequestGuard, keys=keys, limits=limits, metrics=metrics)
    return app


async def _behind(first: Delta, pieces: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    yield first
    async for piece in pieces:
        yield piece


async def _all_of(pieces: AsyncIterator[Delta]) -> None:
    async for _ in pieces:
        pass


async def _to_the_end(texts: AsyncIterator[str], path: str, answers: list[ServiceAnswer]) -> AsyncIterator[str]:
    """Yields the events of a stream. If `texts` raises, yields one error event last, in the dialect of `path`, and
    empties `answers`, because no answer of this stream counts as received by the client."""
    try:
        async for text in texts:
            yield text
    except Exception as error:
        answers.clear()
        refused = as_refused(error)
        if refused.status == 500:
            log.exception("a stream failed")
        yield stream_error(path, refused)
