"""The routes of the console, which only read.

The page itself is open to all, because it holds no data; the requests that the page makes for data need a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Annotated

from fastapi import FastAPI, Query
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from service.console.report import page_file
from service.console.run_reader import RunReader
from service.errors import JsonReply
from service.routes import CONSOLE, CONSOLE_ROUTES, add_routes

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


def add_console(app: FastAPI, reader: RunReader) -> None:
    """Adds the routes of the console of the run that `reader` reads."""
    add_routes(app, CONSOLE_ROUTES, _Console(reader), include_in_schema=False)


class _Console:
    """The functions behind the routes of the console. Functions that read files are not `async`, so that they run in
    threads."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._lock = Lock()  # the reader caches contents

    async def to_page(self) -> Response:
        """Redirects the browser to the page. The address is relative, because a proxy may serve the console below
        another path."""
        return RedirectResponse(f"{CONSOLE.removeprefix('/')}/", headers=dict(HEADERS))

    async def page(self) -> Response:
        """Returns the console's HTML page."""
        return _file("console.html", "text/html")

    async def asset(self, name: str) -> Response:
        """Returns the stylesheet or script file `name` of the page."""
        if name not in ASSETS:
            raise HTTPException(404, "the console has no such file")
        return _file(name, ASSETS[name])

    def run(self) -> Response:
        """Returns the progress of the run, and the state of its parts."""
        return self._reply(self._reader.overview)

    def curves(self) -> Response:
        """Returns the charts of metrics, and the ages of all groups that were trained on."""
        return self._reply(self._reader.curves)

    def curve(self, name: Name) -> Response:
        """Returns the values of the metric `name`."""
        return self._reply(self._reader.curve, name)

    def timeline(self, steps: Annotated[int, Query(ge=1, le=50)] = 5) -> Response:
        """Returns the work of each process in the newest steps."""
        return self._reply(self._reader.timeline, steps)

    def rollouts(self) -> Response:
        """Returns the steps that have recorded rollouts."""
        return self._reply(self._reader.rollouts.steps)

    def groups(self, step: Number) -> Response:
        """Returns the groups of a step."""
        return self._reply(self._reader.rollouts.groups, step)

    def group(self, step: Number, group: Number) -> Response:
        """Returns the rollouts of a group."""
        return self._reply(self._reader.rollouts.group, step, group)

    def rollout(self, step: Number, group: Number, rollout: Number, start: Number = 0) -> Response:
        """Returns a page of the tokens of a rollout, from token `start` on."""
        return self._reply(self._reader.rollouts.tokens, step, group, rollout, start)

    def sessions(self) -> Response:
        """Returns the list of the run's sessions."""
        return self._reply(self._reader.sessions.listing)

    def session(self, name: Name) -> Response:
        """Returns the tree of a session."""
        return self._reply(self._reader.sessions.tree, name)

    def node(self, name: Name, node: Number, start: Number = 0) -> Response:
        """Returns a page of the tokens on the path from the root of a session's tree to the end of `node`; the page
        begins at token `start`."""
        return self._reply(self._reader.sessions.tokens, name, node, start)

    def logs(self) -> Response:
        """Returns the list of logs."""
        return self._reply(self._reader.logs.listing)

    def log(self, attempt: Number, name: Name, end: Number | None = None) -> Response:
        """Returns the part of a log that ends before byte `end` (None: the end of the log)."""
        return self._reply(self._reader.logs.part, attempt, name, end)

    def _reply(self, read: Callable[..., object], *arguments: object) -> JsonReply:
        with self._lock:
            return JsonReply(read(*arguments), headers=dict(HEADERS))


def _file(name: str, kind: str) -> Response:
    return Response(page_file(name), media_type=kind, headers=dict(HEADERS))
