"""The parts of `scripts/gpu_check.py` that start vLLM and runs, on CPUs, with the same code as on GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_support import ROOT, shm_left_since

PARTS = {
    "engine": {"sleep": "not run", "a GPU that computes": "not run"},
    "system": {"tests marked gpu": "not run"},
    "several": {},
}
"""What a part does not show on CPUs."""


@pytest.mark.long  # what the parts check is tested here too: test_inference.py, test_inference_lora.py, test_run.py
@pytest.mark.parametrize("part", PARTS)
def test_a_part_passes_on_cpus(part: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "scripts/gpu_check.py", "--device", "cpu", "--part", part]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}  # for its logs
    process = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, timeout=580)
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    endings = {check["check"]: check["ending"] for check in result["checks"]}
    assert endings == {name: PARTS[part].get(name, "pass") for name in endings}, process.stdout
    assert process.returncode == 0
    assert shm_left_since(before) == set()
