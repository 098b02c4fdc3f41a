"""Fixtures of the tests of commands."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs where the paths of the configurations lead, and gives environment and signal handlers back."""
    monkeypatch.chdir(ROOT)
    environ = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    os.environ.clear()
    os.environ.update(environ)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def no_cluster() -> Iterator[None]:
    yield
    ray = sys.modules.get("ray")
    assert ray is None or not ray.is_initialized()
