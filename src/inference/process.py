"""How a replica starts its engine process, and why that process never outlives it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from multiprocessing.context import BaseContext, ForkContext, ForkProcess, SpawnContext, SpawnProcess

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """The kernel kills this process when its parent dies, however that happens; at once if it is already gone.

    Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


class _ForkedEngine(ForkProcess):
    def run(self) -> None:
        die_with_parent()
        super().run()


class _SpawnedEngine(SpawnProcess):
    def run(self) -> None:
        die_with_parent()
        super().run()


class _ForkContext(ForkContext):
    Process = _ForkedEngine  # type: ignore[assignment]


class _SpawnContext(SpawnContext):
    Process = _SpawnedEngine  # type: ignore[assignment]


def engine_context(start_method: str) -> BaseContext:
    """A multiprocessing context, `fork` or `spawn`, whose processes die with their parent."""
    return _ForkContext() if start_method == "fork" else _SpawnContext()


def use_engine_context(start_method: str) -> None:
    """Makes vLLM start its engine process by `start_method`. Call before the first engine of this process."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: engine_context(start_method)
