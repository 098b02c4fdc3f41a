"""How bytes get into the engine process."""

from __future__ import annotations

import os

import numpy as np

from inference.weight_files import WeightFiles, in_memory_files
from trireme.core.types import WeightIdentity
from trireme.core.weights import Canary, WeightsManifest


def test_what_the_engine_process_maps_is_whole_and_private_and_leaves_nothing_behind() -> None:
    canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), 1e-4)
    manifest = WeightsManifest(WeightIdentity(1, 0, "d"), (), canary)
    buckets = [np.arange(200, dtype=np.uint8), np.full(5000, 7, np.uint8)]
    open_before = set(os.listdir("/proc/self/fd"))
    with in_memory_files(buckets) as paths:
        files = WeightFiles(manifest, paths)
        received = files.open()
        received[0][3] = 99
        again = files.open()
    assert [a.tolist() for a in again] == [b.tolist() for b in buckets]
    assert received[0][3] == 99
    del received, again  # mappings hold descriptors of their own
    assert not any(os.path.exists(path) for path in paths)
    assert set(os.listdir("/proc/self/fd")) <= open_before
