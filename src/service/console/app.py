"""The routes of the console, which only read. The page itself is open, as it holds no data; its requests are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from service.asked import RequestRefused
from service.console.reading import RunReader
from service.console.report import page_file
from service.errors import JsonReply, error_reply
from trireme.core.errors import TriremeError

PATH = "/console"
ASSETS = {
    "console.css": "text/css",
    "charts.js": "text/javascript",
    "timeline.js": "text/javascript",
    "base.js": "text/javascript",
    "console.js": "text/javascript",
    "rooms.js": "text/javascript",
    "tokens.js": "text/javascript",
    "rollouts.js": "text/javascript",
    "sessions.js": "text/javascript",
    "logs.js": "text/javascript",
}
"""The files in `page/` that are served, and their types."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""Only the page's own files are loaded and run: no text of a model can become a script, or send anything."""
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

Number = Annotated[int, Query(ge=0, lt=1 << 53)]
Name = Annotated[str, Query(max_length=300)]


class ConsoleRoutes:
    """The routes of the console of one run. Functions that read files are not `async`: they run in threads."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader

    def routes(self, app: FastAPI) -> None:
        """Adds all routes to the app."""
        hidden: Any = {"include_in_schema": False}
        app.get(PATH, **hidden)(self.to_page)
        app.get(f"{PATH}/", **hidden)(self.page)
        app.get(f"{PATH}/files/{{name}}", **hidden)(self.asset)
        api = f"{PATH}/api"
        app.get(f"{api}/run", **hidden)(self.run)
        app.get(f"{api}/curves", **hidden)(self.curves)
        app.get(f"{api}/curve", **hidden)(self.curve)
        app.get(f"{api}/timeline", **hidden)(self.timeline)
        app.get(f"{api}/rollouts", **hidden)(self.rollouts)
        app.get(f"{api}/groups", **hidden)(self.groups)
        app.get(f"{api}/group", **hidden)(self.group)
        app.get(f"{api}/rollout", **hidden)(self.rollout)
        app.get(f"{api}/sessions", **hidden)(self.sessions)
        app.get(f"{api}/session", **hidden)(self.session)
        app.get(f"{api}/node", **hidden)(self.node)
        app.get(f"{api}/logs", **hidden)(self.logs)
        app.get(f"{api}/log", **hidden)(self.log)

    async def to_page(self) -> Response:
        """Sends the browser to the page. (Relative: a proxy may have another path before it.)"""
        return RedirectResponse(f"{PATH.removeprefix('/')}/", headers=dict(HEADERS))

    async def page(self) -> Response:
        """Returns the page."""
        return _file("console.html", "text/html")

    async def asset(self, name: str) -> Response:
        """Returns a style or a script of the page."""
        if name not in ASSETS:
            raise HTTPException(404, "the console has no such file")
        return _file(name, ASSETS[name])

    def run(self) -> Response:
        """Returns how far the run is, and the state of its parts."""
        return _reply(self._reader.overview())

    def curves(self) -> Response:
        """Returns the curves and the ages."""
        return _reply(self._reader.curves())

    def curve(self, name: Name) -> Response:
        """Returns one metric."""
        return _reply(self._reader.curve(name))

    def timeline(self, steps: Annotated[int, Query(ge=1, le=50)] = 5) -> Response:
        """Returns the work of each process in the newest steps."""
        return _reply(self._reader.timeline(steps))

    def rollouts(self) -> Response:
        """Returns the steps that have recorded rollouts."""
        return _reply(self._reader.rollouts.steps())

    def groups(self, step: Number) -> Response:
        """Returns the groups of a step."""
        return _reply(self._reader.rollouts.groups(step))

    def group(self, step: Number, group: Number) -> Response:
        """Returns the rollouts of a group."""
        with self._reader.lock:
            return _reply(self._reader.rollouts.group(step, group))

    def rollout(self, step: Number, group: Number, rollout: Number, start: Number = 0) -> Response:
        """Returns a page of the tokens of a rollout."""
        decode = self._reader.decode()
        with self._reader.lock:
            return _reply(self._reader.rollouts.tokens(step, group, rollout, start, decode))

    def sessions(self) -> Response:
        """Returns the sessions."""
        with self._reader.lock:
            return _reply(self._reader.sessions.listing())

    def session(self, name: Name) -> Response:
        """Returns the tree of a session."""
        with self._reader.lock:
            return _reply(self._reader.sessions.tree(name))

    def node(self, name: Name, node: Number, start: Number = 0) -> Response:
        """Returns a page of the tokens up to a node of a session."""
        decode = self._reader.decode()
        with self._reader.lock:
            return _reply(self._reader.sessions.tokens(name, node, start, decode))

    def logs(self) -> Response:
        """Returns the list of logs."""
        return _reply(self._reader.logs.listing())

    def log(self, attempt: Number, name: Name, end: Number | None = None) -> Response:
        """Returns a part of a log."""
        return _reply(self._reader.logs.part(attempt, name, end))


def add_refusals(app: FastAPI) -> None:
    """Lets the app answer errors as those of the service."""

    async def refused(request: Request, error: Exception) -> Response:
        reply = error_reply(request.url.path, _as_refused(error))
        reply.headers.update(HEADERS)
        return reply

    for kind in (RequestRefused, RequestValidationError, HTTPException, TriremeError, Exception):
        app.add_exception_handler(kind, refused)


def _as_refused(error: Exception) -> RequestRefused:
    match error:
        case RequestRefused():
            return error
        case RequestValidationError():
            wrong = "; ".join(f"{each['loc'][-1]}: {each['msg']}" for each in error.errors())
            return RequestRefused(
                f"given: {wrong}; expected: the numbers and names that the page asks with", status=400
            )
        case HTTPException():
            return RequestRefused(str(error.detail), status=error.status_code)
        case TriremeError():
            return RequestRefused(str(error), status=409)
        case _:
            return RequestRefused("an error of the console, which its log tells", status=500)


def _file(name: str, kind: str) -> Response:
    return Response(page_file(name), media_type=kind, headers=dict(HEADERS))


def _reply(values: Any) -> JsonReply:
    return JsonReply(values, headers=dict(HEADERS))
