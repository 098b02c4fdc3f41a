"""Ray's own processes are killed under a run on one machine: the command starts them again, and the run is whole."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from chaos_support import CHAOS, assert_whole, end_of, started, wait_for
from resume_support import rows_of
from run_support import DEADLINE_S

from trireme.checkpoint.store import CheckpointStore
from trireme.process.ray_cluster import SERVICES

STEPS, KILLED_AT = 40, 5
FLAGS = [*CHAOS, "--trainer.shards", "1", "--inference.replicas", "1", "--max-steps", str(STEPS)]


@pytest.mark.long
@pytest.mark.parametrize("service", SERVICES)
def test_it_is_started_again_and_the_run_continues_from_its_checkpoint(service: str, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def has_begun() -> bool:
        return len(rows_of(run / "trained.jsonl")) > KILLED_AT and bool(CheckpointStore(run).checkpoints())

    with started(tmp_path, FLAGS, {}) as running:
        wait_for(f"step {KILLED_AT} and a checkpoint", has_begun, running, DEADLINE_S)
        (victim,) = (process for process in psutil.Process(running.process.pid).children() if process.name() == service)
        os.kill(victim.pid, signal.SIGKILL)
        outcome = end_of(running, tmp_path)
    incidents = [
        process["what"] for process in rows_of(outcome.root / "incidents.jsonl") if process["part"] == "cluster"
    ]
    assert len(incidents) == 2, outcome.out
    assert f"{service} (exit code -9)" in incidents[0]
    assert incidents[1].startswith("Ray was started again; attempt 2 begins at step ")
    assert {row["attempt"] for row in outcome.rows} == {1, 2}, "it went back to a checkpoint, not to the start"
    assert_whole(outcome, STEPS)
