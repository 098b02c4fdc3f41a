"""The examples run as a person starts them, learn something, leave models that open, and leave nothing else."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from run_support import DEADLINE_S, ROOT, marked_processes, shm_left_since, wait_until_disconnected


def run(name: str, directory: Path, *flags: str) -> tuple[str, list[dict[str, Any]]]:
    """Returns the output of an example and the rows that it writes. Checks that no process of it is left."""
    mark = f"TRIREME_TEST_MARK={uuid.uuid4().hex}"
    shm = set(os.listdir("/dev/shm"))
    process = subprocess.run(
        [sys.executable, f"examples/{name}.py", "--run.output-dir", str(directory), "--run.name", name, *flags],
        cwd=ROOT,
        env={**os.environ, **dict([mark.split("=")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert process.returncode == 0, process.stdout
    assert wait_until_disconnected(mark, 20.0) == []
    assert not marked_processes(mark)
    assert shm_left_since(shm) == set()
    rows = [json.loads(line) for line in (directory / name / "metrics.jsonl").open()]
    return process.stdout, rows


def check_model(path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(path).config.vocab_size == len(AutoTokenizer.from_pretrained(path))


def test_rl_loop(tmp_path: Path) -> None:
    printed, rows = run("rl_loop", tmp_path, "--max-steps", "3", "--orchestrator.batch-size", "4")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(0 < row["reward/total"] < 1 and row["grad_norm"] > 0 for row in rows)
    assert rows[0]["lr"] == pytest.approx(1e-4), "a quarter of the batch: half of the rate"
    assert all(row["kl_sample_train_v2"] < 1e-4 for row in rows), "sampled by the weights that are trained"
    assert "step 3/3  reward" in printed
    assert "Task was destroyed" not in printed
    check_model(tmp_path / "rl_loop" / "model")
    assert (tmp_path / "rl_loop" / "state" / ".metadata").exists()
    assert {path.name for path in (tmp_path / "rl_loop" / "logs").iterdir()} >= {"trainer_0.log", "inference_0.log"}


@pytest.mark.long  # its rooms are those of rl_loop.py without replicas; its loss runs in test_sft.py
def test_sl_loop(tmp_path: Path) -> None:
    printed, rows = run("sl_loop", tmp_path, "--max-steps", "12", "--trainer.shards", "2")
    before, after = (float(line.split()[-1]) for line in printed.splitlines() if "test nll" in line)
    assert after < before - 0.05
    assert rows[-1]["train_mean_nll"] < rows[0]["train_mean_nll"]
    check_model(tmp_path / "sl_loop" / "model")
