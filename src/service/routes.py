"""Every route of the service, and who may call it. The app has these routes and no others, which a test checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Caller = Literal["all", "client", "admin or loopback"]


@dataclass(frozen=True)
class Route:
    """One route."""

    method: str
    """Its HTTP method."""
    path: str
    """Its path, with names of its parts in braces."""
    caller: Caller
    """Who may call it; an admin key opens all that a client's opens."""
    what: str
    """Its purpose."""


ROUTES = (
    Route("GET", "/health", "all", "200 while the service answers; it tells nothing else"),
    Route("GET", "/v1/models", "client", "the models that are there"),
    Route("GET", "/v1/models/{name}", "client", "one of them"),
    Route("POST", "/v1/chat/completions", "client", "OpenAI's chat completions"),
    Route("POST", "/v1/completions", "client", "OpenAI's completions, of text or token ids"),
    Route("POST", "/v1/responses", "client", "OpenAI's responses, without storage"),
    Route("POST", "/v1/messages", "client", "Anthropic's messages"),
    Route("GET", "/metrics", "admin or loopback", "numbers for Prometheus"),
    Route("GET", "/openapi.json", "client", "the schema of all bodies"),
)
CALLERS = {route.path: route.caller for route in ROUTES}


def caller_of(path: str) -> Caller:
    """Returns who may call a path. An unknown one tells its 404 to clients alone."""
    return CALLERS.get(path, "client")
