"""Sent files are found in their place by this process and those that it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trireme.core.model_places import PLACES, place_of, set_place


def test_a_name_without_sent_files_is_its_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLACES, raising=False)
    assert place_of("org/base") == "org/base"


def test_sent_files_are_found_in_processes_that_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACES, "{}")
    set_place("org/base", Path("/cache/12"))
    set_place("/models/other", Path("/cache/34"))
    assert (place_of("org/base"), place_of("/models/other")) == ("/cache/12", "/cache/34")
    code = "from trireme.core.model_places import place_of; print(place_of('org/base'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), timeout=60
    )
    assert done.stdout == "/cache/12\n"
