"""What a process of an engine does before it computes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from inference.engine_startup import _CONTEXTS, forget_shared_memory, round_up
from inference.gloo_loop import share_gloo_loop


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


def have_a_queue(seconds: float) -> None:
    """Makes shared memory, takes its name away, ends it as vLLM does, and waits."""
    queue = SharedMemory(create=True, size=4096)
    maps = Path("/proc/self/maps").read_text()
    for _rank in range(2):
        forget_shared_memory(maps)
    assert f"{queue.name} (deleted)" in Path("/proc/self/maps").read_text()
    queue.close()
    queue.unlink()
    hold(seconds)


def test_a_name_that_ranks_have_taken_away_is_no_error_where_the_queue_ends(capfd: pytest.CaptureFixture[str]) -> None:
    process = _CONTEXTS["fork"].Process(target=have_a_queue, args=(0.0,))  # type: ignore[attr-defined]
    process.start()
    process.join(60)
    assert (process.exitcode, capfd.readouterr().err) == (0, "")


def sum_in_groups(rank: int, port: int, groups: int, shared: bool, found: Any) -> None:
    """Sums `rank` over two ranks in each of so many groups; gives the sums, and how many threads gloo has for them."""
    if shared:
        share_gloo_loop()
        share_gloo_loop()  # as an actor does that starts its engine again
    store = dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    sums = []
    for number in range(groups):
        group = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=30))
        assert isinstance(group._get_backend(torch.device("cpu")), distributed_c10d.ProcessGroupGloo)
        column = torch.full((1000,), float(rank + number))
        dist.all_reduce(column, group=group)
        sums.append(float(column[0]))
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    found.put((sums, threads.count("gloo_tcp_loop")))
    dist.destroy_process_group()


@pytest.mark.parametrize("shared", [True, False])
def test_groups_of_a_rank_share_a_thread(shared: bool) -> None:
    """When they do so without `share_gloo_loop`, it is not needed any more."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=60), wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    ranks = [context.Process(target=sum_in_groups, args=(rank, store.port, 3, shared, found)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        assert [found.get(timeout=120) for _ in ranks] == [([1.0, 3.0, 5.0], 1 if shared else 4)] * 2
    finally:
        for process in ranks:
            process.join(30)
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]


def test_batches_have_few_sizes_and_grow_by_an_eighth_at_most() -> None:
    sizes = [round_up(rows) for rows in range(1, 8193)]
    assert all(rows <= size <= rows * 9 / 8 for rows, size in enumerate(sizes, start=1))
    assert sizes[:16] == list(range(1, 17))
    assert (len(set(sizes[:256])), len(set(sizes))) == (48, 88)
