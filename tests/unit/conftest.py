"""Fixtures of several unit test modules."""

import os

import pytest


@pytest.fixture
def instant_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forced onto the disk: no test can tell without a power failure, and on a busy disk it takes long."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
