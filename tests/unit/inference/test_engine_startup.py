"""What a process of an engine does before it computes."""

import contextlib
import logging
import os
import signal
import tempfile
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest
import torch
from waiting import wait_for

from inference.engine_startup import _CONTEXTS, LogOnce, choose_method, forget_shared_memory


def hold(seconds: float) -> None:
    time.sleep(seconds)


def have_one(seconds: float) -> None:
    _CONTEXTS["fork"].Process(target=hold, args=(seconds,)).start()  # type: ignore[attr-defined]
    hold(seconds)


def test_a_process_and_those_that_it_starts_end_with_the_one_above() -> None:
    top = _CONTEXTS["fork"].Process(target=have_one, args=(60.0,))  # type: ignore[attr-defined]
    top.start()
    below = wait_for(psutil.Process(top.pid).children, "a process below")
    os.kill(top.pid, signal.SIGKILL)
    assert psutil.wait_procs(below, timeout=30)[1] == []
    top.join()


def have_a_queue(seconds: float) -> None:
    """Makes shared memory, takes its name away, ends it as vLLM does, and waits."""
    queue = SharedMemory(create=True, size=4096)
    maps = Path("/proc/self/maps").read_text()
    for _rank in range(2):
        forget_shared_memory(maps)
    late = Path("/proc/self/maps").read_text()
    assert f"{queue.name} (deleted)" in late
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        Path("(deleted)").touch()
        forget_shared_memory(late)
        assert Path("(deleted)").exists(), "a mark in the maps is no name"
    queue.close()
    queue.unlink()
    hold(seconds)


def test_a_name_that_ranks_have_taken_away_is_no_error_where_the_queue_ends(capfd: pytest.CaptureFixture[str]) -> None:
    process = _CONTEXTS["fork"].Process(target=have_a_queue, args=(0.0,))  # type: ignore[attr-defined]
    process.start()
    process.join(60)
    assert (process.exitcode, capfd.readouterr().err) == (0, "")


def test_engines_are_forked_where_cuda_rests(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_method(on_cpu=True, ranks=2) == "fork"
    assert choose_method(on_cpu=False, ranks=1) == "fork"
    assert choose_method(on_cpu=False, ranks=2) == "spawn"
    assert not caplog.records
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert choose_method(on_cpu=False, ranks=1) == "spawn"
    assert "CUDA is initialised in process" in caplog.text


def test_a_message_is_logged_once_whatever_stands_in_it(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("of a test")
    logger.addFilter(LogOnce("Not "))
    for name in ("a", "b"):
        logger.warning("Attempted to load weight %s", name)
        logger.warning("Not %s", name)
    assert caplog.messages == ["Attempted to load weight a"]
