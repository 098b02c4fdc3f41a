"""The whole system on NVIDIA GPUs: bfloat16, NCCL, weights through the object store onto a device."""

from pathlib import Path

import pytest
from run_support import TINY, run_rl

from trireme.core.errors import EXIT_OK

pytestmark = pytest.mark.gpu


def test_one_gpu_is_shared_by_trainer_and_replica(tmp_path: Path) -> None:
    """Every update passes its canary in bfloat16, and the bound holds."""
    outcome = run_rl(
        tmp_path,
        *TINY,
        *("--max-steps", "10", "--cluster.device", "gpu", "--trainer.shards", "1"),
        *("--inference.gpu-memory-utilization", "0.4"),
    )
    assert outcome.code == EXIT_OK, outcome.out
    assert len(outcome.rows) == 10
    assert max(row["off_policy/max"] for row in outcome.rows) <= 1
    outcome.assert_nothing_left()
