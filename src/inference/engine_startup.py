"""Starts a replica's engine process, and makes sure that it never outlives the replica.

An engine of several ranks starts a process for each rank. These processes never outlive the engine's: the kernel kills
each when its parent dies.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext, ForkContext, ForkProcess, SpawnContext, SpawnProcess
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from inference.cpu.start import prepare_cpu_start
from trireme.core.own_packages import ROOT
from trireme.process.environ import write_stacks_on_signal

log = logging.getLogger(__name__)
PR_SET_PDEATHSIG = 1
QUEUES = "/dev/shm/psm_"
"""Path of the files of `multiprocessing.shared_memory`, up to a random part of the name."""
PATH_COLUMN = 5
"""The column of a line of a process's maps that has the path; the columns before it have no spaces."""
DELETED = " (deleted)"
"""Suffix of the path of a deleted file that is still open."""


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies in any way, or now if the parent is already gone.

    Raises OSError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # another process has adopted this one
        os.kill(os.getpid(), signal.SIGKILL)


def forget_shared_memory(maps: str) -> None:
    """Removes the names in /dev/shm of the queues of vLLM's ranks. `maps`: the text of a process's /proc/PID/maps,
    which lists the queues. Python's resource tracker would remove the names once all processes of the engine have
    ended, but Ray may kill the tracker first."""
    names = {line.split(maxsplit=PATH_COLUMN)[PATH_COLUMN] for line in maps.splitlines() if QUEUES in line}
    for path in [Path(name) for name in names if not name.endswith(DELETED)]:
        with suppress(FileNotFoundError):  # another rank was faster
            path.unlink()
            resource_tracker.unregister(f"/{path.name}", "shared_memory")


def tolerate_forgotten_names() -> None:
    """Patches `SharedMemory.unlink` in this process to ignore a name that does not exist: `forget_shared_memory`
    removes the names of vLLM's queues early, and vLLM removes them once more when it closes a queue."""
    plain = SharedMemory.unlink

    def unlink(self: SharedMemory) -> None:
        with suppress(FileNotFoundError):
            plain(self)

    SharedMemory.unlink = unlink  # type: ignore[method-assign]


class _Forked(ForkProcess):
    def run(self) -> None:
        die_with_parent()
        tolerate_forgotten_names()
        super().run()  # SIGUSR1 writes stacks: what handles it was forked too


class _Spawned(SpawnProcess):
    def start(self) -> None:
        sys.path.insert(0, str(ROOT))  # which the child takes over: it unpickles this class before it can run anything
        try:
            super().start()
        finally:
            sys.path.remove(str(ROOT))

    def run(self) -> None:
        die_with_parent()
        tolerate_forgotten_names()
        write_stacks_on_signal()
        _start_ranks_by(None)
        super().run()


class _ForkContext(ForkContext):
    Process = _Forked


class _SpawnContext(SpawnContext):
    Process = _Spawned


_CONTEXTS: Mapping[str, BaseContext] = {"fork": _ForkContext(), "spawn": _SpawnContext()}
"""Ways to start a process that never outlives its parent, by their names in multiprocessing."""


def _start_ranks_by(method: str | None) -> None:
    """Makes an engine in this process, or forked from it, start its ranks in processes that never outlive it. `method`:
    a key of _CONTEXTS, "fork" or "spawn"; None: as vLLM chooses."""
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: _CONTEXTS[method or get_mp_context().get_start_method()]


class LogOnce(logging.Filter):
    """A log filter: passes only the first record of each message, whatever its arguments. If the prefix `without` is
    not empty, also drops every message that begins with this prefix."""

    def __init__(self, without: str = "") -> None:
        super().__init__()
        self._without = without
        self._logged: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = str(record.msg)
        if message in self._logged or (self._without and message.startswith(self._without)):
            return False
        self._logged.add(message)
        return True


def quieten_vllm() -> None:
    """Silences two messages of an engine in this process, or forked from it. The message about a tensor that is loaded
    in another dtype is logged only once. The message that OMP_NUM_THREADS is set is never logged, because every run
    has this variable: Trireme or Ray sets it."""
    logging.getLogger("vllm.model_executor.models.utils").addFilter(LogOnce())
    logging.getLogger("vllm.utils.torch_utils").addFilter(LogOnce("OMP_NUM_THREADS="))


def choose_method(*, on_cpu: bool, ranks: int) -> str:
    """Returns how to start the process of an engine with `ranks` ranks: "fork" or "spawn". A forked engine need not
    import vLLM again, which takes 9 CPU seconds of each start (`inference.cpu`).

    vLLM spawns its engine inside Ray actors, because a forked child cannot use Ray; our engine does not use Ray. CUDA
    does not survive a fork. Normally this process has no CUDA context; if some code made one, the engine is spawned,
    with a warning. An engine with ranks on several GPUs is spawned, as in vLLM.
    """
    if on_cpu:
        return "fork"
    import torch

    if torch.cuda.is_initialized():
        log.warning("the engine is spawned and imports vLLM again: CUDA is initialised in process %d", os.getpid())
        return "spawn"
    if ranks == 1:
        return "fork"
    return "spawn"


def prepare_start(on_cpu: bool, ranks: int) -> None:
    """Sets how vLLM starts engines of `ranks` ranks in this process, and how these engines start their ranks. Call it
    before the first engine."""
    from vllm.v1.engine import utils

    method = choose_method(on_cpu=on_cpu, ranks=ranks)
    utils.get_mp_context = lambda: _CONTEXTS[method]
    quieten_vllm()
    if on_cpu:
        _start_ranks_by(method)
        prepare_cpu_start()
