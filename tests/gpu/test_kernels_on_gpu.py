"""Kernels agree with plain operations there: those of the head with float64, those of sums bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[1] / "unit"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "words",
    [
        ["trainer/head_kernels_oracle.py", "cuda"],
        ["transports/device_sums_oracle.py", "cuda", "0"],
        ["transports/device_sums_oracle.py", "cuda", "1"],
    ],
)
def test_kernels_agree_with_their_oracle(words: list[str]) -> None:
    process = subprocess.run([sys.executable, *words], cwd=UNIT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
