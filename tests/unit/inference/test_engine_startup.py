"""What a process of an engine does before it computes."""

from __future__ import annotations

import os
import signal
import time

import psutil

from inference.engine_startup import _CONTEXTS


def hold(seconds: float) -> None:
    time.sleep(seconds)


def have_one(seconds: float) -> None:
    _CONTEXTS["fork"].Process(target=hold, args=(seconds,)).start()  # type: ignore[attr-defined]
    hold(seconds)


def test_a_process_and_those_that_it_starts_end_with_the_one_above() -> None:
    top = _CONTEXTS["fork"].Process(target=have_one, args=(60.0,))  # type: ignore[attr-defined]
    top.start()
    deadline = time.monotonic() + 30
    while not (below := psutil.Process(top.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(top.pid, signal.SIGKILL)
    assert psutil.wait_procs(below, timeout=30)[1] == []
    top.join()
