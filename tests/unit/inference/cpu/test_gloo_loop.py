"""Groups of gloo share a thread."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from inference.cpu.gloo_loop import share_gloo_loop


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
