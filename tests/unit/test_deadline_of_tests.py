"""A test that hangs is ended by name, with the place where it hangs, and the others run."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
WRITTEN = """
import threading, pytest

def test_that_hangs():
    def a_wait_without_a_deadline():
        threading.Event().wait()
    a_wait_without_a_deadline()

def test_that_does_not():
    pass

@pytest.mark.long
def test_that_may_take_long():
    threading.Event().wait(3)
"""


def test_a_test_that_hangs_is_ended_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_written.py").write_text(WRITTEN)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    options = ["-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "conftest", "-n", "1", "--deadline", "1.5"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "crashed while running" in said.stdout
    assert "test_that_hangs" in said.stdout
    assert "1 failed, 2 passed" in said.stdout
    assert "a_wait_without_a_deadline" in said.stderr


def test_a_file_in_which_a_test_hangs_is_begun_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With whole files for each process pytest-xdist runs the test that ended one again in the next: nine times with
    two processes, without the limit in our options."""
    (tmp_path / "test_written.py").write_text(WRITTEN)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    with (TESTS.parent / "pyproject.toml").open("rb") as file:
        words = tomllib.load(file)["tool"]["pytest"]["ini_options"]["addopts"].split()
    ours = [word for name in ("--dist", "--max-worker-restart") for word in (name, words[words.index(name) + 1])]
    options = ["-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "conftest", "-n", "2", "--deadline", "1.5", *ours]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "2 failed" in said.stdout, said.stdout
