"""A double of S3, and a place in it for each test."""

from collections.abc import Iterator

import pytest
from store_support import Double, double


@pytest.fixture(scope="module")
def server() -> Iterator[Double]:
    with double() as running:
        yield running


@pytest.fixture
def url(server: Double, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A new prefix on a server that does what it is asked."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.ignores, server.refuses, server.busy = (), lambda _request: False, False
    return f"{server.url}/{abs(hash(request.node.name))}"
