"""An engine process differs from what vLLM would do by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PROBE = """
import ctypes
import torch
from inference.engine_startup import prepare_start
from vllm import _custom_ops as ops

class MallInfo(ctypes.Structure):
    names = ("arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost").split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = MallInfo
matrix = ops.create_onednn_mm(torch.randn(64, 64), 32)
batches, plain = torch.randn(600, 64), ops.onednn_mm
prepare_start(on_cpu=True, ranks=1)
for n in (1, 15, 17, 33, 130, 255, 509):
    assert torch.equal(ops.onednn_mm(matrix, batches[:n], None), plain(matrix, batches[:n], None))
used = []
for size in range(1, 601):
    assert ops.onednn_mm(matrix, batches[:size], None).shape == (size, 64)
    if size % 300 == 0:
        used.append(mallinfo().uordblks)
torch.ops._C.init_cpu_memory_env([0])
print("grew by", used[1] - used[0])
"""
FLAT = 5 << 20


@dataclass(frozen=True)
class Probed:
    growth: int
    """Bytes that it has more in use after products of batches of sizes 301 to 600. Some sizes are multiplied in both
    ways, which must be equal bit for bit."""
    bindings: int
    """How often its memory was bound to the machine's first node."""


@pytest.fixture(scope="module")
def engine() -> Probed:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, "-c", PROBE], env=environ, capture_output=True, text=True, timeout=120)
    assert "grew by" in process.stdout, process.stderr
    return Probed(int(process.stdout.rsplit("grew by", 1)[1]), process.stderr.count("NUMA binding"))


def test_an_engine_makes_no_kernel_for_every_size_of_batch(engine: Probed) -> None:
    assert engine.growth < FLAT


def test_memory_is_not_moved_where_there_is_one_place_for_it(engine: Probed) -> None:
    status = Path("/proc/self/status").read_text()
    (nodes,) = [line.split()[1] for line in status.splitlines() if line.startswith("Mems_allowed_list:")]
    assert engine.bindings == (0 if nodes.isdigit() else 1)
