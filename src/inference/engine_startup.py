"""Starts a replica's engine process fast on CPUs, and makes sure that it never outlives the replica.

With several ranks the engine's process starts one process for each, which computes, and these never outlive it: the
kernel kills each with its parent.

Measured from the actor's start to a replica that is ready (tiny Qwen3, 2 cores, byte code compiled), in CPU seconds of
the actor, its engine process and their helpers; each is the same within 1 s however busy the machine:

| | caches warm | first start on a machine |
|---|---|---|
| as vLLM starts it in a Ray actor | 26 | 53 |
| as below | 13 | 14 |

Of the 13, importing vLLM takes 9; it was imported twice in series, and on a first start a third time to look at the
model's class. The compiler took 18 on a first start. The memory of both processes falls from 1.4 to 1.0 GiB.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext, ForkContext, ForkProcess, SpawnContext, SpawnProcess
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from inference.gloo_loop import share_gloo_loop
from trireme.process.environ import write_stacks_on_signal

PR_SET_PDEATHSIG = 1
QUEUES = "/dev/shm/psm_"
"""Path of what `multiprocessing.shared_memory` makes, up to a random part of the name."""
SIZES_PER_OCTAVE = 8
"""Between n and 2 n, from n = 16 on, so many sizes of batches get kernels of an engine on CPUs."""


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent dies in any way, or now if the parent is already gone.

    Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # another process has adopted this one
        os.kill(os.getpid(), signal.SIGKILL)


def forget_shared_memory(maps: str) -> None:
    """Takes away the names in /dev/shm of the queues of vLLM's ranks that `maps`, the text of a process's maps, has.
    Python's resource tracker would do that once all processes of the engine have ended, but Ray may kill it first."""
    for path in {Path(line.split()[-1]) for line in maps.splitlines() if QUEUES in line}:
        with suppress(FileNotFoundError):  # another rank was faster
            path.unlink()
            resource_tracker.unregister(f"/{path.name}", "shared_memory")


def tolerate_forgotten_names() -> None:
    """Has `SharedMemory.unlink` accept in this process that the name is gone: ranks take the names of vLLM's queues
    away (`forget_shared_memory`), and vLLM's own end of a queue does it once more."""
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
    """Has an engine in this process, or forked from it, start its ranks so that they never outlive it, by `method` of
    _CONTEXTS; None: by vLLM's choice."""
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: _CONTEXTS[method or get_mp_context().get_start_method()]


def round_up(rows: int) -> int:
    """Returns the size of the batch as which so many rows are multiplied: at most an eighth more."""
    unit = 1 << max((rows // SIZES_PER_OCTAVE).bit_length() - 1, 0)
    return -(-rows // unit) * unit


@cache
def multiply_by_few_kernels() -> None:
    """Has an engine in this process, or forked from it, multiply batches of a few sizes, with rows of zeros after those
    that count; results are the same, bit for bit. A second call changes nothing.

    oneDNN makes a kernel for each size of a batch that a matrix is multiplied with. While requests end one after the
    other, nearly every step has another size. A model of 0.3 million parameters took 0.8 ms longer for such a step, of
    some 10 ms, if the kernels had been forgotten since that size was seen last, and several ms the first time. If they
    were not forgotten, an engine grew by 0.1 to 0.4 MiB with each.
    """
    import torch
    from vllm import _custom_ops

    plain = _custom_ops.onednn_mm

    def multiply(
        dnnl_handler: _custom_ops.CPUDNNLGEMMHandler, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows = x.shape[0]
        more = round_up(rows) - rows
        if not more or x.dim() != 2:
            return plain(dnnl_handler, x, bias)
        return plain(dnnl_handler, torch.constant_pad_nd(x, (0, 0, 0, more)), bias)[:rows]

    _custom_ops.onednn_mm = multiply


def prepare_start(on_cpu: bool) -> None:
    """Sets how vLLM starts engines in this process, and these their ranks. Call before the first one."""
    from vllm.v1.engine import utils

    # vLLM spawns its engine inside Ray actors, because a forked child can not use Ray; ours does not. Forking spares
    # it a second import of vLLM. With a GPU vLLM's choice stays: CUDA does not survive a fork.
    method = "fork" if on_cpu else "spawn"
    utils.get_mp_context = lambda: _CONTEXTS[method]
    if not on_cpu:
        return
    _start_ranks_by(method)
    import torch
    from vllm.model_executor.models import registry
    from vllm.utils.cpu_resource_utils import get_memory_affinity

    multiply_by_few_kernels()
    share_gloo_loop()
    # Spares a compiler: models run eagerly here, yet the function that ranks sampled tokens would be compiled at the
    # first request that wants logprobs.
    torch.compiler.set_stance("force_eager")
    # Spares a process that imports all of vLLM again: vLLM looks at a model's class there so as not to initialise CUDA
    # in this one.
    registry._run_in_subprocess = lambda fn: fn()
    # Spares an engine a wait on machines with one memory node. vLLM moves the process's pages to the node that it
    # chooses (migrate_pages(2)). For that the kernel first runs a thread on each core that orders its lists of pages:
    # on a busy core this took 3 s and more, in which the engine stood still.
    if len(get_memory_affinity()) == 1:
        torch.ops._C.init_cpu_memory_env = lambda _nodes: None  # type: ignore[attr-defined]
