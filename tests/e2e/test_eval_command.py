"""`trireme eval` on the shipped model, as a person would call it: real Ray and vLLM, no trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "trireme.tools.main", "eval"]


def test_the_shipped_model_is_evaluated(tmp_path: Path) -> None:
    output = tmp_path / "numbers.json"
    flags = ["--eval.samples", "2", "--eval.problems", "16", "--output", str(output)]
    command = [*COMMAND, "assets/sort-base", "@", "configs/quickstart.toml", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "avg@2" in done.stdout
    numbers = json.loads(output.read_text())
    assert numbers["identity"] == "1:0:as-loaded"
    assert numbers["eval/sort/n"] == 32
    assert 0.2 < numbers["eval/sort/avg@2"] < 0.7, "the start of the quickstart: about .43"
    assert numbers["eval/sort/pass@1"] <= numbers["eval/sort/pass@2"]


def test_bad_input_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, str(tmp_path / "none")], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "error:" in done.stderr
