"""The table of routes, which the docs repeat. (console/test_app.py compares it with the app.)"""

from pathlib import Path

import pytest

from service.routes import ROUTES, caller_of, name_of

PAGE = Path(__file__).parents[3] / "docs" / "service.md"


def test_the_docs_have_the_table() -> None:
    rows = [f"| {r.method} | `{r.path}` | {r.caller} | {r.purpose} |" for r in ROUTES]
    table = [line for line in PAGE.read_text().splitlines() if line.startswith(("| GET", "| POST", "| DELETE"))]
    assert table == rows


def test_each_route_has_the_caller_of_the_table() -> None:
    for route in ROUTES:
        path = route.path.replace("{session}", "a1").replace("{name}", "policy")
        assert caller_of(route.method, path) == route.caller, route


@pytest.mark.parametrize(
    ("method", "path", "caller"),
    [
        ("GET", "/v1/anything", "client"),
        ("GET", "/signed/1/2/3", "all"),  # addresses of downloads need no key
        ("GET", "/sessions/", "admin"),
        ("GET", "/sessions//export", "admin"),
        ("POST", "/sessions/a1/anything", "session"),
    ],
)
def test_other_paths_are_for_clients_but_for_those_beside_sessions(method: str, path: str, caller: str) -> None:
    assert caller_of(method, path) == caller


def test_metrics_know_routes_not_sessions() -> None:
    assert name_of("/sessions/a1/v1/messages") == "/sessions/{session}/v1/messages"
    assert name_of("/sessions/a1") == "/sessions/{session}"
    assert name_of("/sessions/a1/b2") == name_of("/v1/models/policy") == "other"
