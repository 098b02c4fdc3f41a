"""`run_support.shm_left_since`: which new files in /dev/shm were left by a run, and which belong to another program."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from run_support import shm_left_since, tracked_semaphores

PROGRAM = """
import multiprocessing, os, signal
context = multiprocessing.get_context("spawn")
context.Lock()  # starts the resource tracker
if not os.fork():
    lock = context.Lock()
    print(lock._semlock.name.strip("/"), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
print("killed", flush=True)
input()
"""
"""A program of which one process is killed while it has a semaphore."""


@contextmanager
def program() -> Iterator[str]:
    """The name of that semaphore's file. The program ends in the end."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        name = f"sem.{process.stdout.readline().strip()}"
        assert process.stdout.readline() == "killed\n"
        yield name
        process.communicate("\n")


def test_the_semaphore_of_a_process_that_was_killed_belongs_to_its_program() -> None:
    before = os.listdir("/dev/shm")
    with program() as name:
        assert name in os.listdir("/dev/shm"), "nobody has it mapped, and the program goes on"
        assert name not in shm_left_since(before)


def test_a_semaphore_that_no_living_tracker_removes_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with program() as name:
        assert name in tracked_semaphores()
        monkeypatch.setattr(psutil, "process_iter", lambda _attrs: iter(()))
        assert tracked_semaphores() == set()


def test_any_other_file_was_left() -> None:
    before, file = os.listdir("/dev/shm"), Path("/dev/shm") / f"left-{uuid.uuid4().hex}"
    file.touch()
    try:
        assert file.name in shm_left_since(before)
    finally:
        file.unlink()
