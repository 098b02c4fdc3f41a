"""The table of routes, which the docs repeat. (test_app.py compares it with the app.)"""

from __future__ import annotations

from pathlib import Path

from service.routes import ROUTES, caller_of

PAGE = Path(__file__).parents[3] / "docs" / "service.md"


def test_the_docs_have_the_table() -> None:
    rows = [f"| {r.method} | `{r.path}` | {r.caller} | {r.what} |" for r in ROUTES]
    table = [line for line in PAGE.read_text().splitlines() if line.startswith(("| GET", "| POST"))]
    assert table == rows


def test_other_paths_are_for_clients() -> None:
    assert caller_of("/v1/anything") == "client"
    assert caller_of("/v1/models/policy") == "client"
    assert caller_of("/metrics") == "admin or loopback"
