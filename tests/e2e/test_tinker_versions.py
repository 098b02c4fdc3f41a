"""The oldest of Tinker's clients that works, installed from the package index, against the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.tinker.app import OLDEST
from tinker_versions import tried


@pytest.mark.long
def test_the_oldest_client_trains_samples_saves_and_resumes(tmp_path: Path) -> None:
    version = ".".join(map(str, (*OLDEST, 0)))
    said = tried(version, tmp_path)
    assert said == ""


@pytest.mark.long
def test_the_client_before_it_is_refused_and_told_why(tmp_path: Path) -> None:
    said = tried("0.24.1", tmp_path)
    assert "since 0.25" in said
