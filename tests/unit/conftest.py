"""Fixtures of several unit test modules."""

import os

import pytest
from hypothesis import settings

settings.register_profile("unit", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("unit")


@pytest.fixture
def instant_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forced onto the disk: no test can tell without a power failure, and on a busy disk it takes long."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
