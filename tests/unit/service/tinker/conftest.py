"""A server of a model that is trained whole, for the tests that need no other."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tinker_support import Served, tinker_server


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with tinker_server(tmp_path) as served:
        yield served
