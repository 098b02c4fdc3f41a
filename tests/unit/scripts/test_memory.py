"""What is counted on tensors without memory is what real shards hold."""

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks_support import run_ranks
from trainer_support import make_model
from transformers import AutoConfig, AutoModelForCausalLM

from memory import PASS, Case, LiveBytes, count_shard, make_shard, take_step

M_MMAP_THRESHOLD = -3
OF_THE_PROCESS = 64 * 2**20
"""The most that a process grows beside tensors: code of libraries and Python's objects, whatever the size."""
SIZES = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 8192,
    "layers": 4,
}


class Resident(LiveBytes):
    """Also records, by moment, how much the resident memory of this process grew beyond that at first."""

    def __init__(self) -> None:
        super().__init__()
        self.grown: dict[str, int] = {}
        self.first = status_bytes("VmRSS")

    @contextmanager
    def moment(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        with super().moment(name):
            yield
        self.grown[name] = status_bytes("VmHWM") - self.first


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def warm_up(directory: str) -> None:
    """Uses each library once: their code becomes resident then."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory, num_hidden_layers=1))
    loss = model(input_ids=torch.arange(64)[None], use_cache=False).logits.float().logsumexp(-1).sum()
    loss.backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()


def measured(rank: int, world_size: int, store: dist.Store, case: Case, directory: str) -> tuple[int, int]:
    """Runs a real shard. Returns what is counted of its pass, and how much its resident memory grew."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**16)  # freed tensors are not resident any more
    warm_up(directory)
    libc.malloc_trim(0)
    with Resident() as count:
        shard = make_shard(case, directory, rank, store, count)
        libc.malloc_trim(0)
        take_step(shard, case.batch(), count)
    dist.destroy_process_group()
    return count.peaks[PASS].device, count.grown[PASS]


@pytest.mark.long
@pytest.mark.parametrize("options", [{"checkpointing": False}, {"checkpointing": True}])
def test_real_shards_hold_what_is_counted(tmp_path: Path, options: dict[str, Any]) -> None:
    """In tensors, and in resident memory, in which freed tensors are not (`measured`)."""
    directory = make_model(tmp_path, "qwen3", True, max_position_embeddings=1024, **SIZES)
    described = json.loads((tmp_path / "config.json").read_text())
    case = Case(described, shards=2, tokens=1024, length=512, gpu=False, options=options)
    counted = count_shard(case)[PASS].device
    for counted_bytes, resident in run_ranks(2, measured, case, directory):
        assert abs(counted_bytes / counted - 1) < 0.08
        assert 0 < resident - counted_bytes < OF_THE_PROCESS
