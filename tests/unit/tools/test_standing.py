"""Where a run stands, as text."""

import os
from pathlib import Path

import pytest
from supervision_support import roster_of

from trireme.core.errors import LimitReached
from trireme.supervision.roster import PartHealth
from trireme.supervision.status import Status, StatusWriter
from trireme.tools.standing import described, standing, target_of, troubles

RUNNING = f"running, process {os.getpid()}"


def status_of(run: Path, health: PartHealth, finished: bool = False) -> Status:
    """Writes and returns the STATUS of a run with one replica."""
    with StatusWriter(run, roster_of(health)):
        live = Status.read(run)
    return Status.read(run) if finished else live


def test_the_last_step_of_a_run_that_counts_epochs_follows_from_its_progress() -> None:
    assert target_of({"max_steps": 0}, {"step": 4, "progress": 0.25}) == "20"
    assert target_of({"max_steps": 8}, {"step": 4, "progress": 0.25}) == "8"
    assert target_of({"max_steps": 0}, None) == "?"


def test_a_supervised_run_is_described_by_its_data() -> None:
    trainer = {"learning_rate": 1e-4, "schedule": "cosine", "shards": 2}
    data = {"train": "train.jsonl", "train_on": "assistant", "batch_size": 32}
    config = {"model": {"name": "m", "dtype": "auto"}, "trainer": trainer, "data": data}
    assert described(config) == [
        ("model.name", "m"),
        ("model.dtype", "auto"),
        ("data.train", "train.jsonl"),
        ("data.train_on", "assistant"),
        ("data.batch_size", "32"),
        ("trainer.learning_rate", "0.0001"),
        ("trainer.shards", "2"),
    ]
    assert described({"model": {}}) == []


def test_parts_that_are_not_healthy(tmp_path: Path) -> None:
    status = status_of(tmp_path, PartHealth.DEAD)
    assert troubles(status, status.at + 1) == "inference_0 dead"
    assert troubles(status, status.at + 40) == "no word from the driver for 40 s"
    assert troubles(None, 0.0) == ""
    status = status_of(tmp_path, PartHealth.DEAD, finished=True)
    assert troubles(status, status.at + 1000) == ""


def test_how_the_run_ended_is_told(tmp_path: Path) -> None:
    assert "has not begun" in standing(None, RUNNING)
    status = status_of(tmp_path, PartHealth.HEALTHY)
    assert standing(status, RUNNING) == ""
    assert "the driver was killed" in standing(status, "not running")
    assert "a new command begins; the one before it was killed" in standing(status, "running, process 1")
    with pytest.raises(LimitReached), StatusWriter(tmp_path, roster_of(PartHealth.DEAD)):
        raise LimitReached("inference_0 failed 4 times")
    outcome = "ended with exit code 3: inference_0 failed 4 times"
    assert standing(Status.read(tmp_path), "not running") == outcome
    assert standing(Status.read(tmp_path), RUNNING) == outcome
    assert standing(Status.read(tmp_path), "running, process 1") == (
        f"a new command begins; the one before it {outcome}"
    )
