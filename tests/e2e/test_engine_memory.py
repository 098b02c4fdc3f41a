"""What an engine process keeps, whatever it is asked: vLLM's own kernels, in a process that is told how many."""

from __future__ import annotations

import os
import subprocess
import sys

from inference.startup import KEPT_KERNELS

PROBE = """
import ctypes
import torch
from vllm._custom_ops import create_onednn_mm, onednn_mm

class MallInfo(ctypes.Structure):
    names = ("arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost").split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = MallInfo
matrix = create_onednn_mm(torch.randn(64, 64), 32)
used = []
for size in range(1, 601):
    onednn_mm(matrix, torch.randn(size, 64), None)
    if size % 300 == 0:
        used.append(mallinfo().uordblks)
print("grew by", used[1] - used[0])
"""
FLAT = 5 << 20


def growth(environ: dict[str, str]) -> int:
    """Bytes that a process has more in use after batches of sizes 301 to 600."""
    own = {name: value for name, value in os.environ.items() if name != KEPT_KERNELS[0]}
    ended = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**own, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "grew by" in ended.stdout, ended.stderr
    return int(ended.stdout.rsplit("grew by", 1)[1])


def test_an_engine_does_not_keep_a_kernel_for_every_size_of_batch() -> None:
    assert growth(dict([KEPT_KERNELS])) < FLAT


def test_it_would_by_default() -> None:
    """When it does not, `KEPT_KERNELS` is not needed any more."""
    assert growth({}) > 10 * FLAT
