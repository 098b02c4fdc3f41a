"""Ends what a process has started, and all that came of it, once the process has ended, however that was.

Run as a program (`python reaper.py PID MARK`) it waits for the end of its parent, and then kills every process whose
environment has the mark. A process that was forked without another program has the environment of its parent's start,
and is not found.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress

NAME = "REAPED_WITH_TESTS"
LOOK_S, KILL_S = 0.5, 60.0
_reapers: list[subprocess.Popen[bytes]] = []


def reap_after_this_process() -> None:
    """Has all that this process starts from now on killed when it has ended, by SIGKILL too."""
    mark = f"{NAME}={uuid.uuid4().hex}"
    command = [sys.executable, "-S", "-E", __file__, str(os.getpid()), mark]
    nowhere = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # A session of its own: a signal to the group of this process does not end it.
    _reapers.append(subprocess.Popen(command, start_new_session=True, **nowhere))
    os.environ[NAME] = mark.partition("=")[2]


def _marked(mark: bytes) -> list[int]:
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as environ:  # it may have ended
            if mark in environ.read().split(b"\0"):
                pids.append(int(name))
    return pids


def main(parent: int, mark: str) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    end = time.monotonic() + KILL_S  # those that are killed may have started others meanwhile
    while (remaining := _marked(mark.encode())) and time.monotonic() < end:
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
