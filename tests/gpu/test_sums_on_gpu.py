"""The kernel of device sums on a GPU agrees with tensor operations there, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest

ORACLE = Path(__file__).parents[1] / "unit" / "transports" / "device_sums_oracle.py"


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1])
def test_sums_are_those_of_tensor_operations(seed: int) -> None:
    process = subprocess.run([sys.executable, ORACLE, "cuda", str(seed)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
