"""How bytes get into the engine process."""

from __future__ import annotations

import os

import numpy as np

from inference.actor import in_memory_files


def test_what_the_engine_process_maps_is_whole_and_private_and_leaves_nothing_behind() -> None:
    def mapped(path: str) -> np.ndarray:
        return np.memmap(path, dtype=np.uint8, mode="c")  # as the engine process does

    buckets = [np.arange(200, dtype=np.uint8), np.full(5000, 7, np.uint8)]
    open_before = set(os.listdir("/proc/self/fd"))
    with in_memory_files(buckets) as paths:
        received = list(map(mapped, paths))
        received[0][3] = 99
        again = list(map(mapped, paths))
    assert [a.tolist() for a in again] == [b.tolist() for b in buckets]
    assert received[0][3] == 99
    del received, again  # mappings hold descriptors of their own
    assert not any(os.path.exists(path) for path in paths)
    assert set(os.listdir("/proc/self/fd")) <= open_before
