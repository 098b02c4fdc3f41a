"""An engine process differs from what vLLM would do by itself, and vLLM would still do that."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from inference.engine_startup import KEPT_KERNELS

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


BINDING = """
from inference.engine_startup import prepare_start
import torch
import vllm._custom_ops
{prepare}
torch.ops._C.init_cpu_memory_env([0])
print("done")
"""


def bindings(prepare: str) -> int:
    """How often the memory of a process is bound to the machine's first node."""
    probe = BINDING.format(prepare=prepare)
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    assert "done" in ended.stdout, ended.stderr
    return ended.stderr.count("NUMA binding")


def test_memory_is_not_moved_where_there_is_one_place_for_it() -> None:
    status = Path("/proc/self/status").read_text()
    (nodes,) = [line.split()[1] for line in status.splitlines() if line.startswith("Mems_allowed_list:")]
    assert bindings("prepare_start(on_cpu=True)") == (0 if nodes.isdigit() else 1)


def test_it_would_be_moved_by_default() -> None:
    """When it is not, `_stay_on_the_only_node` is not needed any more."""
    assert bindings("") == 1
    vllm = find_spec("vllm")
    assert vllm
    assert vllm.origin
    worker = Path(vllm.origin).parent / "v1" / "worker" / "cpu_worker.py"
    assert "torch.ops._C.init_cpu_memory_env(" in worker.read_text()
