"""Several ranks, each a process of its own, forked from one that has imported the trainer."""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

DEADLINE_S = 180.0


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns the results of `work(rank, world_size, store, *args)` on each rank, which find each other by `store`.

    `work` is a function of a module that can be imported. Raises RuntimeError with the traceback of a rank that fails.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainer.shard"])
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=DEADLINE_S), wait_for_workers=False)
    ends, processes = [], []
    for rank in range(world_size):
        parent, child = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(child, rank, world_size, store.port, work, args), daemon=True)
        process.start()
        child.close()
        ends.append(parent)
        processes.append(process)
    try:
        return [_result(rank, end) for rank, end in enumerate(ends)]
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def run_alone(work: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of `work` on the one rank that there is, this process."""
    from torch.distributed import TCPStore

    return work(0, 1, TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False), *args)


def _result(rank: int, end: Any) -> Any:
    if not end.poll(DEADLINE_S):
        raise RuntimeError(f"rank {rank} said nothing for {DEADLINE_S:.0f} s")
    outcome = pickle.loads(end.recv_bytes())
    if isinstance(outcome, str):
        raise RuntimeError(f"rank {rank}: {outcome}")
    return outcome[0]


def _run(end: Any, rank: int, world_size: int, port: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    from torch.distributed import TCPStore

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=DEADLINE_S))
    outcome: tuple[Any] | str
    try:
        outcome = (work(rank, world_size, store, *args),)
    except Exception:
        outcome = traceback.format_exc()
    end.send_bytes(pickle.dumps(outcome))  # not `send`, which would share tensors with a process that ends
    end.close()
