"""`run_support.Running.lines`: a run that hangs is read to its deadline, and not for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

from run_support import Running, marked_processes

HANGS = """
import subprocess, sys, time
print("begun", flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""
"""A program that prints nothing more, with a process that has its output open too."""


def started(program: str, directory: Path) -> Running:
    mark = f"TRIREME_TEST_MARK={uuid.uuid4().hex}"
    environ = {**os.environ, **dict([mark.split("=")])}
    process = subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True)
    return Running(process, mark, directory, frozenset())


def test_a_run_that_hangs_is_killed_with_all_of_its_processes_at_the_deadline(tmp_path: Path) -> None:
    running = started(HANGS, tmp_path)
    assert list(running.lines(limit_s=2.0)) == [
        "begun\n",
        "(all of its processes were killed, as it had not ended in 2 s)\n",
    ]
    assert running.process.wait(60) != 0
    assert marked_processes(running.mark) == {}


def test_the_lines_of_a_run_that_ends_can_be_read_in_two_parts(tmp_path: Path) -> None:
    running = started("print(1); print(2); print(3)", tmp_path)
    for line in running.lines():
        if line == "1\n":
            break
    assert list(running.lines()) == ["2\n", "3\n"]
    assert running.process.wait(60) == 0
