"""Runs Triton's kernels on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(oracle: Path) -> str:
    """Runs the program `oracle` with Triton's interpreter, which must be chosen before Triton is imported. Returns what
    the program prints. Raises AssertionError with its errors if it fails."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", oracle, "cpu"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
