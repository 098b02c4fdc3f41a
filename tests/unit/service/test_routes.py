"""The table of routes, which the docs repeat. (test_app.py compares it with the app.)"""

from pathlib import Path

from service.routes import ROUTES, caller_of, name_of

PAGE = Path(__file__).parents[3] / "docs" / "service.md"


def test_the_docs_have_the_table() -> None:
    rows = [f"| {r.method} | `{r.path}` | {r.caller} | {r.what} |" for r in ROUTES]
    table = [line for line in PAGE.read_text().splitlines() if line.startswith(("| GET", "| POST", "| DELETE"))]
    assert table == rows


def test_other_paths_are_for_clients() -> None:
    assert caller_of("GET", "/v1/anything") == "client"
    assert caller_of("GET", "/v1/models/policy") == "client"
    assert caller_of("GET", "/metrics") == "admin or loopback"


def test_addresses_of_downloads_need_no_key() -> None:
    assert caller_of("GET", "/signed/1/2/3") == "all"


def test_each_route_has_the_caller_of_the_table() -> None:
    for route in ROUTES:
        path = route.path.replace("{session}", "a1").replace("{name}", "policy")
        assert caller_of(route.method, path) == route.caller, route


def test_what_is_beside_the_routes_of_sessions_is_for_no_client() -> None:
    assert caller_of("GET", "/sessions/") == "admin"
    assert caller_of("GET", "/sessions//export") == "admin"
    assert caller_of("POST", "/sessions/a1/anything") == "session"
    assert caller_of("GET", "/sessions/a1/export") == caller_of("POST", "/sessions/a1/reward") == "admin"


def test_metrics_know_routes_not_sessions() -> None:
    assert name_of("/sessions/a1/v1/messages") == "/sessions/{session}/v1/messages"
    assert name_of("/sessions/a1") == "/sessions/{session}"
    assert name_of("/sessions/a1/b2") == name_of("/v1/models/policy") == "other"
