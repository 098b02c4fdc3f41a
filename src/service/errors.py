"""Writes refused requests and other errors as replies, with the error body of each dialect."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from service.dialects.wire import refusal_of
from service.requests import RequestRefused
from service.routes import in_session
from trireme.core.errors import BadInput, StorageFailed, TriremeError
from trireme.core.finite_json import to_json

RETRY_AFTER_S = 5.0
"""Seconds after which a refused client may try again: by then a failed replica may have a successor, and a replica that
was being started may serve."""

OPENAI_TYPES = {429: "requests"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class JsonReply(Response):
    """A reply with a JSON body in ASCII. Other characters are escaped, because a client may have sent some that UTF-8
    cannot hold."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Returns `content` as JSON bytes."""
        return to_json(content).encode()


def is_anthropic(path: str) -> bool:
    """Returns True if requests at `path` use Anthropic's dialect."""
    return in_session(path)[1].startswith("/v1/messages")


def error_body(path: str, refused: RequestRefused) -> dict[str, object]:
    """Returns the JSON body of a refusal, in the dialect of requests at `path`."""
    if is_anthropic(path):
        kind = ANTHROPIC_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": refused.message}}
    kind = OPENAI_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


def stream_error(path: str, refused: RequestRefused) -> str:
    """Returns the server-sent event, in the dialect of `path`, that ends a stream because of an error."""
    name = "error" if is_anthropic(path) else None
    data = error_body(path, refused)
    if in_session(path)[1].startswith("/v1/responses"):
        name = "error"
        data = {"type": name, "message": refused.message, "code": refused.code, "param": refused.param}
    return (f"event: {name}\n" if name else "") + f"data: {to_json(data)}\n\n"


def error_reply(path: str, refused: RequestRefused, *, close: bool = False) -> JsonReply:
    """Returns the reply that refuses a request. `close`: True ends the connection, because the request's body was not
    read."""
    headers = {"connection": "close"} if close else {}
    if refused.retry_after_s is not None:
        headers["retry-after"] = f"{max(1, round(refused.retry_after_s))}"
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JsonReply(error_body(path, refused), refused.status, headers)


def as_refused(error: Exception) -> RequestRefused:
    """Returns the refusal that reports `error` to a client. A known error keeps its message and gets the status for
    errors of its class; an unexpected error gets status 500."""
    match error:
        case RequestRefused():
            return error
        case BadInput():
            return RequestRefused(str(error))
        case TriremeError():
            if isinstance(error, StorageFailed):
                code = "storage_failed"
            else:
                code = "replicas_failed"
            return RequestRefused(str(error), status=503, code=code, retry_after_s=RETRY_AFTER_S)
        case RequestValidationError():
            return refusal_of(error.errors())
        case HTTPException():
            return RequestRefused(str(error.detail), status=error.status_code)
    return RequestRefused("an error of the service, which its log tells", status=500)


def add_refusals(app: FastAPI, headers: Mapping[str, str]) -> None:
    """Makes the app reply to every error with a refusal in the dialect of the request's path. These replies have the
    HTTP headers `headers`."""

    async def refused(request: Request, error: Exception) -> Response:
        reply = error_reply(request.url.path, as_refused(error))
        reply.headers.update(headers)
        return reply

    for kind in (RequestRefused, TriremeError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
