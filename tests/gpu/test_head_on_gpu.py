"""The kernels of the head on a GPU agree with float64 there."""

import subprocess
import sys
from pathlib import Path

import pytest

ORACLE = Path(__file__).parents[1] / "unit" / "trainer" / "head_kernels_oracle.py"


@pytest.mark.gpu
def test_log_probabilities_and_gradients_are_those_of_float64() -> None:
    process = subprocess.run([sys.executable, ORACLE, "cuda"], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
