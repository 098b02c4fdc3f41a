"""Every route of the service and of its console, and who may call it. The apps take their routes from here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI

Caller = Literal["all", "client", "session", "admin", "admin or loopback"]
SESSIONS = "/sessions/"
SIGNED = "/signed/"
"""Begins the addresses of downloads, which hold a signature instead of a key."""


@dataclass(frozen=True)
class Route:
    """One route."""

    method: str
    """Its HTTP method."""
    path: str
    """Its path, with names of its parts in braces."""
    caller: Caller
    """Who may call it. An admin key opens everything. A session's key opens the routes of its session, and the routes
    of clients, which then act on its session. The policy has the session's key, so no route that judges the policy
    accepts it."""
    purpose: str
    """Its purpose."""
    function: str = ""
    """The name of the function that answers it; "": FastAPI answers it."""


ROUTES = (
    Route("GET", "/health", "all", "200 while the service answers", "health"),
    Route("GET", "/v1/models", "client", "the names of the served model", "models"),
    Route("GET", "/v1/models/{name}", "client", "one name of the model", "model"),
    Route("POST", "/v1/chat/completions", "client", "OpenAI's chat completions", "chat"),
    Route("POST", "/v1/completions", "client", "OpenAI's completions, of text or token ids", "completions"),
    Route("POST", "/v1/responses", "client", "OpenAI's responses, without storage", "responses"),
    Route("POST", "/v1/messages", "client", "Anthropic's messages", "messages"),
    Route("GET", "/metrics", "admin or loopback", "numbers for Prometheus", "metrics"),
    Route("GET", "/openapi.json", "client", "the schema of all bodies"),
    Route("POST", "/sessions", "admin", "opens a session: its base URLs and its key", "open"),
    Route("GET", "/sessions", "admin", "all sessions that were not forgotten", "list"),
    Route("GET", "/sessions/{session}", "session", "what a session has so far", "state"),
    Route("POST", "/sessions/{session}/reward", "admin", "a reward for an answer, or for the whole session", "reward"),
    Route("POST", "/sessions/{session}/end", "session", "ends a session: no further turn begins", "end"),
    Route("GET", "/sessions/{session}/export", "admin", "the tokens and rewards of a session that has ended", "export"),
    Route("DELETE", "/sessions/{session}", "admin", "forgets a session that has ended", "forget"),
    Route("GET", "/sessions/{session}/v1/models", "session", "the same as /v1/models", "models"),
    Route("GET", "/sessions/{session}/v1/models/{name}", "session", "the same as /v1/models/{name}", "model"),
    Route(
        "POST",
        "/sessions/{session}/v1/completions",
        "session",
        "OpenAI's completions, each prompt as a turn",
        "completions",
    ),
    Route("POST", "/sessions/{session}/v1/responses", "session", "OpenAI's responses, as a turn", "responses"),
    Route("POST", "/sessions/{session}/v1/messages", "session", "Anthropic's messages, as a turn", "messages"),
    Route("POST", "/sessions/{session}/v1/chat/completions", "session", "OpenAI's chat completions, as a turn", "chat"),
)
CONSOLE = "/console"
CONSOLE_DATA = {
    "run": "how far the run is, its parts and incidents",
    "curves": "curves and ages",
    "curve": "one metric",
    "timeline": "who did what in the newest steps",
    "rollouts": "the steps with recorded rollouts",
    "groups": "the groups of a step",
    "group": "the rollouts of a group",
    "rollout": "the tokens of a rollout",
    "sessions": "the sessions that were not forgotten",
    "session": "the tree of a session",
    "node": "the tokens up to a node of it",
    "logs": "the logs that there are",
    "log": "a part of a log",
}
CONSOLE_ROUTES = (
    Route("GET", "/console", "all", "leads to the page of the console", "to_page"),
    Route(
        "GET", "/console/", "all", "the page, which asks for an admin key and shows what the next routes tell", "page"
    ),
    Route("GET", "/console/files/{name}", "all", "its styles and scripts", "asset"),
    *(Route("GET", f"/console/api/{name}", "admin", purpose, name) for name, purpose in CONSOLE_DATA.items()),
)
"""The routes of the console (`service.console`). They are for administrators, so the schema at `/openapi.json` does not
have them. The page and its files are open to all, because they hold no data."""
CALLERS = {route.path: route.caller for route in (*ROUTES, *CONSOLE_ROUTES)}
ADMIN_ALONE = ("/export", "/reward")


def add_routes(app: FastAPI, routes: Iterable[Route], functions: object, **options: Any) -> None:
    """Adds `routes` to an app. Each route is answered by the method of `functions` that `route.function` names; a route
    without a function is left out. `{name}` in a path also matches text with slashes, because the name of a model may
    contain slashes."""
    for route in routes:
        if route.function:
            path = route.path.replace("{name}", "{name:path}")
            app.add_api_route(path, getattr(functions, route.function), methods=[route.method], **options)


def in_session(path: str) -> tuple[str, str]:
    """Returns (session, rest) of a path: the name of the session in the path, and the path after that name; ("", path)
    if the path has no session."""
    if not path.startswith(SESSIONS):
        return "", path
    session, slash, rest = path.removeprefix(SESSIONS).partition("/")
    return session, slash + rest


def name_of(path: str) -> str:
    """Returns the label of a path for metrics and refusals. If the table of routes has the path with `{session}` in
    place of the session's name, returns that path. Otherwise returns "other": the path is unknown, or it contains
    another variable part, such as the name of a model."""
    session, rest = in_session(path)
    path = f"{SESSIONS}{{session}}{rest}" if session else path
    if path in CALLERS:
        return path
    return "other"


def caller_of(method: str, path: str) -> Caller:
    """Returns which callers may use a path. An unknown path is treated like the known routes with the same prefix
    (`/console/api`, for example): a caller who may use those routes gets status 404, and any other caller is
    refused."""
    session, rest = in_session(path)
    if path.startswith(SIGNED):
        return "all"
    if path == CONSOLE or path.startswith(f"{CONSOLE}/"):
        if path.startswith(f"{CONSOLE}/api"):
            return "admin"
        return "all"
    if not session:
        if path.startswith(SESSIONS.rstrip("/")):
            return "admin"
        return CALLERS.get(path, "client")
    if method == "DELETE" or rest in ADMIN_ALONE:
        return "admin"
    return "session"
